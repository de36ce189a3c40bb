"""The figures of the checks in vLLM, whose answers and times are given here."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.check_result import (
    GreedyMatch,
    Percentiles,
    VllmFigures,
)
from pipeline.artifacts.seen_answers import NewAnswers
from pipeline.artifacts.tree_file import ChainLength
from pipeline.config import CheckConfig
from pipeline.decoding.decoder import Decoded
from pipeline.errors import ConfigError
from pipeline.evaluation import served
from pipeline.evaluation.prompts import CheckRequest, Prompt
from pipeline.evaluation.served import (
    LEVELS,
    accepted_per_position,
    load_rows,
    load_study,
    with_expectations,
)
from pipeline.evaluation.speed import check_speed
from pipeline.targets.spec import TargetSpec
from pipeline.targets.vllm_decode import VLLMTexts
from pipeline.targets.vllm_load import LoadFigures, LoadTask
from pipeline.targets.vllm_logits import LogitAnswer, LogitRequest

PROMPTS = [Prompt("a", [0, 5]), Prompt("b", [0, 6])]
CHAIN = {"method": "medusa", "model": "export", "num_speculative_tokens": 3}


@pytest.fixture
def check(monkeypatch, tiny_target):
    def run(plain, accelerated, prompts=PROMPTS, accepted=((3, 1, 3, 1), (2, 1, 2, 1)), below=None):
        decoded = []
        for texts, steps, speed in ((plain, (), 20.0), (accelerated, accepted, 30.0)):
            seconds = sum(map(len, texts)) / speed
            alone = dict.fromkeys(range(len(texts)), 2 * seconds / len(texts))
            decoded.append(VLLMTexts(texts, steps, [seconds], [alone]))
        decoded.append(VLLMTexts(failed="no n-grams"))

        def decode_in_vllm(tasks, told):
            if len(tasks) == 3:
                assert [task.repeats for task in tasks] == [3, 3, 3]
                return decoded
            (again,) = tasks
            assert again.repeats == 1 and "speculative_config" not in again.engine_args
            found = [list(map(answered, batch)) for batch in again.asked]
            return [replace(decoded[0], logits=found)]

        def answered(request: LogitRequest) -> LogitAnswer:
            """Logits of tokens that are as far below the best, token 0, as `below` says."""
            logits = {0: 9.0} | {token: 9.0 - below[token] for token in request.token_ids}
            return LogitAnswer([0] * request.num_tokens, [logits] * request.num_tokens)

        monkeypatch.setattr(served, "decode_in_vllm", decode_in_vllm)
        target = TargetSpec(str(tiny_target))
        return served.check_served(
            CheckRequest(target, "export", prompts, CheckConfig(), speculative_config=CHAIN)
        )

    return run


def error_of(draws: list[float]) -> float:
    """The bootstrapped error of two conversations: either one twice or both, times sqrt(2)."""
    return pytest.approx(math.sqrt(2) * statistics.pstdev(draws), rel=0.1)


@pytest.mark.parametrize(("distance", "is_tie"), [(1e-6, True), (60.0, False)])
def test_ties_are_judged_by_vllm_s_own_logits(check, distance, is_tie):
    found = check([[1, 2], [3]], [[1, 4], [3]], below={2: 0.0, 4: distance})
    assert found.vllm.greedy_match == GreedyMatch(2, 1, int(is_tie), tokens=3)
    assert [one.other_below for one in found.differing] == ([] if is_tie else [distance])
    step = 8 * 2**-23  # float32's, of 8 to 16
    assert found.vllm.tie_tolerance == 2 * found.vllm.logit_change == 2 * step


def test_vllm_s_figures(check):
    found = check([[1, 2], [3]], [[1, 2], [3]]).vllm
    assert found.num_speculative_tokens == 3 and found.acceleration_rate == 1.75
    assert found.standard_error == error_of([2.0, 1.75, 1.75, 1.5])
    assert found.accepted_per_position == [0.5, 0.25, 0.0]
    assert (found.tokens_per_second, found.baseline_tokens_per_second) == (30.0, 20.0)
    assert found.speedup == 1.5 and found.greedy_match == GreedyMatch(2, 2, 0, tokens=3)
    heads, ngram = found.methods
    assert (heads.acceleration_rate, heads.greedy_match) == (1.75, found.greedy_match)
    assert heads.speculative_config == CHAIN
    assert [(row.method, row.requests, row.tokens_per_second) for row in found.loads] == [
        ("heads", 1, 15.0),
        ("heads", 2, 30.0),
    ]
    assert (ngram.name, ngram.failed) == ("ngram", "no n-grams")


def test_equal_steps_give_vllm_the_native_rate(check):
    """Two turns of one question are one conversation; an answer of one token takes no step."""
    accepted = [[4, 1, 2], [3, 3], [], [1, 1, 1, 2]]
    asked = [Prompt("q/0", [5], question_id=7), Prompt("q/1", [6], question_id=7)]
    asked += [Prompt("a", [7]), Prompt("b", [8])]
    found = check([[1]] * 4, [[1]] * 4, asked, accepted=accepted).vllm
    decoded = [Decoded([0] * (1 + sum(kept)), "length", kept, 0.1, 1.0) for kept in accepted]
    natively = check_speed(asked, [{"plain": decoded, "accelerated": decoded}])
    assert found.acceleration_rate == natively.acceleration_rate == 18 / 9
    assert found.standard_error == natively.standard_error
    assert found.standard_error == error_of([13 / 5, 18 / 9, 18 / 9, 5 / 4])
    with pytest.raises(ConfigError, match="no step to measure"):
        check([[1], [3]], [[1], [3]], accepted=[[], []])


@given(st.lists(st.lists(st.integers(1, 4)), min_size=1).filter(any))
def test_shares_per_position_and_one_sum_to_the_rate(accepted):
    shares = accepted_per_position(accepted, 3)
    steps = list(itertools.chain.from_iterable(accepted))
    assert 1 + sum(shares) == pytest.approx(statistics.mean(steps), abs=2e-4)
    assert shares == sorted(shares, reverse=True)


def test_the_chain_s_rate_is_expected_from_both_texts():
    held_out = ChainLength(
        draft_tokens=2,
        expected_acceleration_rate=1.8,
        expected_standard_error=0.2,
        new=NewAnswers(answers=9, expected_acceleration_rate=1.7),
    )
    new = NewAnswers(answers=8, acceleration_rate=1.6)
    plain = VllmFigures(acceleration_rate=1.85, greedy_match=GreedyMatch(2, 2, 0, 500), new=new)
    assert with_expectations(plain, None, None) == plain
    found = with_expectations(plain, 1.9, held_out)
    assert found.same_text_acceleration_rate == 1.9
    assert (found.expected_acceleration_rate, found.expected_standard_error) == (1.8, 0.2)
    assert found.new == replace(new, expected_acceleration_rate=1.7)


def measured(requests=1, seconds=2.0, num_tokens=100, ttft=(0.1,), tpot=(0.01,), rate=None):
    return LoadFigures(requests, seconds, num_tokens, ttft, tpot, rate)


def test_a_row_has_both_servers_speeds_and_their_waiting_times():
    hundred = [number / 1000 for number in range(101)]  # percentile and value in ms are the same
    plain = measured(8, seconds=4.0, num_tokens=100, ttft=hundred, tpot=[None, *hundred])
    with_heads = measured(8, seconds=2.0, num_tokens=100, rate=3.1)
    (row,) = load_rows([plain], [with_heads])
    assert (row.requests, row.speedup, row.acceleration_rate) == (8, 2.0, 3.1)
    assert (row.tokens_per_second, row.baseline_tokens_per_second) == (50, 25)
    assert row.ttft_ms == Percentiles(p50=100, p90=100, p99=100)
    assert row.baseline_ttft_ms == row.baseline_tpot_ms == Percentiles(p50=50, p90=90, p99=99)


def test_all_servers_are_asked_alike(tiny_target, monkeypatch):
    def serve_under_load(tasks, told):
        asked.extend(tasks)
        plain = []
        for level in tasks[0].levels:
            found = measured(level, seconds=1.0, num_tokens=100)
            plain.append(replace(found, speeds=[100.0]))
        return plain, plain, "It died."

    asked: list[LoadTask] = []
    monkeypatch.setattr(served, "serve_under_load", serve_under_load)
    settings = CheckConfig(max_new_tokens=9, studies=["load"])
    target = TargetSpec(str(tiny_target))
    request = CheckRequest(target, "export", PROMPTS, settings, speculative_config=CHAIN)
    found, failed = load_study(request, gpus=0)
    assert settings.repeats == 3, "in two servers"
    task = LoadTask(target, [[0, 5], [0, 6]], 9, repeats=2, levels=LEVELS)
    heads = {"speculative_config": CHAIN}
    assert asked[:2] == [task, replace(task, engine_args=heads, name="vLLM with the heads")]
    assert asked[2].engine_args["speculative_config"]["method"] == "ngram" and asked[2].optional
    assert [row.requests for row in found] == [1, 2, 4, 8, 16, 32, 64]
    assert {row.method for row in found} == {"heads"} and failed == {"ngram": "It died."}
    assert {row.baseline_tokens_per_second for row in found} == {100.0}
