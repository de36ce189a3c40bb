"""The figures of the served check; the target is loaded only where sequences differ."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.check_result import ChainRate, GreedyMatch, VllmFigures
from pipeline.artifacts.json_form import to_json
from pipeline.artifacts.seen_answers import NewAnswers
from pipeline.artifacts.tree_file import ChainLength
from pipeline.config import CheckConfig
from pipeline.decoding.decoder import Decoded
from pipeline.errors import ConfigError
from pipeline.evaluation import served
from pipeline.evaluation.prompts import CheckRequest, Prompt
from pipeline.evaluation.served import accepted_per_position, with_expectations
from pipeline.evaluation.speed import speed
from pipeline.export.layout import ExportLayout
from pipeline.heads.shapes import MedusaShape
from pipeline.targets.spec import TargetSpec
from pipeline.targets.vllm_decode import VLLMTexts

PROMPTS = [Prompt("a", [0, 5]), Prompt("b", [0, 6])]


@pytest.fixture
def check(monkeypatch, tiny_target):
    def run(
        plain: list[list[int]],
        accelerated: list[list[int]],
        prompts: list[Prompt] = PROMPTS,
        accepted=((3, 1, 3, 1), (2, 1, 2, 1)),
    ):
        decoded = [
            VLLMTexts(plain, [], seconds=sum(map(len, plain)) / 20.0, model_runner="V2"),
            VLLMTexts(accelerated, accepted, sum(map(len, accelerated)) / 30.0, "V1"),
        ]
        monkeypatch.setattr(served, "decode_in_vllm", lambda *arguments, **more: decoded)
        layout = ExportLayout(
            "owner/target", MedusaShape(hidden_size=64, vocab_size=300, num_heads=3)
        )
        monkeypatch.setattr(served, "read_layout", lambda _: layout)
        return served.check_served(
            CheckRequest(TargetSpec(str(tiny_target)), "export", prompts, CheckConfig())
        )

    return run


def test_figures_are_per_step_and_equal_sequences_load_no_target(check, monkeypatch):
    monkeypatch.setattr(served, "load_causal_lm", None)
    found = check([[1, 2], [3]], [[1, 2], [3]])
    # Of two answers of 2 and 1.5 tokens per step, bootstrapped: either one twice or both, and
    # widened by sqrt(2).
    draws = [2.0, 1.75, 1.75, 1.5]
    assert to_json(found) == {
        "vllm": {
            "dtype": "float32",
            "num_speculative_tokens": 3,
            "export_alone": False,
            "acceleration_rate": 1.75,
            "standard_error": pytest.approx(math.sqrt(2) * statistics.pstdev(draws), rel=0.1),
            "accepted_per_position": [0.5, 0.25, 0.0],
            "speedup": 1.5,
            "tokens_per_second": 30.0,
            "baseline_tokens_per_second": 20.0,
            "model_runners": {"plain": "V2", "with heads": "V1"},
            "greedy_match": {"sequences": 2, "identical": 2, "ties": 0},
            "tie_tolerance": 1e-4,
        },
        "differing": [],
        "samples": [],
    }


def test_where_sequences_differ_the_target_s_own_gap_decides(check, tiny_target):
    import torch
    from transformers import AutoModelForCausalLM

    found = check([[1, 2], [3, 9]], [[1, 2], [3, 8]])
    logits = AutoModelForCausalLM.from_pretrained(tiny_target)(torch.tensor([[0, 6, 3]])).logits[
        0, -1
    ]
    best, second = logits.topk(2).values.tolist()
    assert found.vllm.greedy_match == GreedyMatch(2, 1, 0)
    (differing,) = found.differing
    assert (differing.id, differing.at) == ("b", 1) and differing.gap == pytest.approx(
        best - second, abs=1e-5
    )


def test_a_rate_is_that_of_native_decoding_with_the_same_steps(check):
    """Answers to two turns of one question are of one conversation, and an answer of one token
    takes no step.
    """
    accepted = [[4, 1, 2], [3, 3], [], [1, 1, 1, 2]]
    asked = [Prompt("q/0", [5], question_id=7), Prompt("q/1", [6], question_id=7, turn=1)]
    asked += [Prompt("a", [7]), Prompt("b", [8])]
    found = check([[1]] * 4, [[1]] * 4, asked, accepted=accepted).vllm
    decoded = [Decoded([0] * (1 + sum(kept)), "length", kept, 0.1, 1.0) for kept in accepted]
    natively = speed(asked, [{"plain": decoded, "accelerated": decoded}])
    assert found.acceleration_rate == natively.acceleration_rate == 2.0, "18 tokens in 9 steps"
    assert found.standard_error == natively.standard_error
    # Two conversations of 13 tokens in 5 steps and 5 in 4.
    draws = [13 / 5, 18 / 9, 18 / 9, 5 / 4]
    assert found.standard_error == pytest.approx(math.sqrt(2) * statistics.pstdev(draws), rel=0.1)


@given(st.lists(st.lists(st.integers(1, 4)), min_size=1).filter(any))
def test_shares_per_position_and_one_sum_to_the_rate(accepted):
    shares = accepted_per_position(accepted, 3)
    steps = list(itertools.chain.from_iterable(accepted))
    assert 1 + sum(shares) == pytest.approx(statistics.mean(steps), abs=2e-4)
    assert shares == sorted(shares, reverse=True)


def test_answers_of_one_token_are_refused_as_natively(check):
    with pytest.raises(ConfigError, match="no step to measure"):
        check([[1], [3]], [[1], [3]], accepted=[[], []])


def test_the_chain_s_expected_rate_is_of_held_out_and_of_the_same_text():
    held_out = ChainLength(
        draft_tokens=2,
        expected_acceleration_rate=1.8,
        expected_standard_error=0.2,
        new=NewAnswers(answers=9, expected_acceleration_rate=1.7),
    )
    same_text = ChainRate(draft_tokens=2, acceleration_rate=1.9, standard_error=0.15)
    plain = VllmFigures(
        acceleration_rate=1.85,
        greedy_match=GreedyMatch(2, 2, 0),
        new=NewAnswers(answers=8, acceleration_rate=1.6),
    )
    found = with_expectations(plain, same_text, held_out)
    assert found.same_text_acceleration_rate == 1.9
    assert (found.expected_acceleration_rate, found.expected_standard_error) == (1.8, 0.2)
    new = NewAnswers(answers=8, acceleration_rate=1.6, expected_acceleration_rate=1.7)
    assert found.new == new
    found = with_expectations(plain, same_text, None)
    assert found == replace(plain, same_text_acceleration_rate=1.9)
    assert with_expectations(plain, None, None) == plain
