"""Figures of decodings whose figures are known by hand, and transformers' own decoding."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from pipeline.artifacts.check_result import EngineFigures, GreedyMatch, Speed
from pipeline.decoding.decoder import Decoded, plain_decoder
from pipeline.evaluation.prompts import Prompt
from pipeline.evaluation.speed import (
    CannotDecode,
    baseline,
    by_category,
    check_speed,
    take_turns,
    with_new_answers,
)
from pipeline.execution.progress import ProgressReporter
from pipeline.targets.spec import TargetSpec

EOS = (1,)
RANDOM = torch.randint(3, 300, (6, 24), generator=torch.Generator().manual_seed(1)).tolist()


def decoded(accepted: list[int], seconds: float, first: float = 0.1) -> Decoded:
    return Decoded(list(range(1 + sum(accepted))), "length", accepted, first, seconds)


PROMPTS = [Prompt("a", [1]), Prompt("b", [1])]
PLAIN = [decoded([1] * 8, 0.8), decoded([1] * 4, 0.4)]  # 12 steps of 0.1 s
# 12 tokens in 5 steps of 0.2 s
MEDUSA = [decoded([3, 1, 4], 0.6, first=0.2), decoded([2, 2], 0.4, first=0.3)]
SLOW = [decoded([3, 1, 4], 5.0, first=0.2), decoded([2, 2], 9.0, first=0.7)]


def test_rates_are_pooled_over_sequences_and_seconds_are_medians():
    passes = [{"plain": PLAIN, "accelerated": side} for side in (MEDUSA, SLOW, MEDUSA)]
    # Two answers, bootstrapped: 8/3, 4/2 or both, in 1, 1 and 2 of 4 draws, widened by sqrt(2).
    draws = [8 / 3, 12 / 5, 12 / 5, 2.0]
    assert check_speed(PROMPTS, passes) == Speed(
        acceleration_rate=pytest.approx(12 / 5),
        standard_error=pytest.approx(math.sqrt(2) * statistics.pstdev(draws), rel=0.1),
        overhead=pytest.approx(0.2 / 0.1),
        speedup=pytest.approx(1.2),
        tokens_per_second=pytest.approx(12.0),
        baseline_tokens_per_second=pytest.approx(10.0),
        range=[pytest.approx(12 / 14, abs=0.01), pytest.approx(12.0)],
        baseline_range=[pytest.approx(10.0)] * 2,
    )


def test_a_category_has_the_figures_of_its_own_prompts():
    names = ("math", "writing", "math", "empty", None)
    prompts = [Prompt(str(number), [1], name) for number, name in enumerate(names)]
    plain = [([1] * 8, 0.8), ([1] * 4, 0.8), ([1] * 2, 0.2), ([], 0.0), ([1], 9.0)]
    with_heads = [([4, 4], 0.4), ([2, 2], 0.4), ([2], 0.1), ([], 0.0), ([1], 9.0)]
    sides = {"plain": plain, "accelerated": with_heads}
    one = {name: [decoded(*each) for each in side] for name, side in sides.items()}
    late = {name: [replace(each, seconds=99.0) for each in side] for name, side in one.items()}
    math, writing, empty = by_category(prompts, [late, one, one])
    assert (math.category, math.prompts, writing.prompts, empty.prompts) == ("math", 2, 1, 1)
    assert math.acceleration_rate == pytest.approx(10 / 3, abs=1e-4)
    assert math.tokens_per_second == pytest.approx(20) == 2 * math.baseline_tokens_per_second
    assert writing.speedup == pytest.approx(2.0)
    assert empty.acceleration_rate is None is empty.speedup


def test_seen_answers_are_not_in_the_rate_on_new_ones():
    """Two of ten answers are seen, and each has one step of 9 tokens."""
    trained = SimpleNamespace(answers=lambda: [[7]])
    request = SimpleNamespace(prompts=[Prompt(name, [1]) for name in "abcdefghij"], trained=trained)
    figures = EngineFigures(acceleration_rate=3.0, greedy_match=GreedyMatch(10, 10, 0, 500))
    found = with_new_answers(figures, request, [[7]] * 2 + [[8]] * 8, [[9]] * 2 + [[1, 2]] * 8)
    assert (found.seen_share, found.new.answers, found.new.acceleration_rate) == (0.2, 8, 1.5)


def test_methods_take_turns_and_each_answer_is_counted():
    asked, reports = [], []

    def decode(ids, seed):
        asked.append((ids, seed, reports[-1].done))
        return decoded([1, 2], 0.1)

    progress = ProgressReporter(show=reports.append)
    progress.begin("native", 6)
    methods = {"a": decode, "failed": decode, "b": decode}
    prompts = [Prompt("x", [7]), Prompt("y", [8])]
    found = take_turns(methods, prompts, {"failed": "before"}, progress)
    assert asked == [([7], 0, 0), ([7], 0, 2), ([8], 1, 3), ([8], 1, 5)]
    assert {name: len(answers) for name, answers in found.items()} == {"a": 2, "b": 2}
    assert (reports[-1].done, reports[-1].tokens) == (6, 4 * len(found["a"][0].token_ids))


@pytest.mark.parametrize("name", ["generate", "prompt-lookup", "assistant"])
def test_a_baseline_writes_the_target_s_greedy_text(model, tiny_target, name):
    forwards = []
    hook = model.register_forward_hook(lambda *_: forwards.append(1))
    assistant = TargetSpec(str(tiny_target)) if name == "assistant" else None
    decode = baseline(name, model, EOS, 20, assistant)
    plain = plain_decoder(model, eos_token_ids=EOS)
    for ids in RANDOM:
        expected = plain.generate(ids, 20)
        forwards.clear()
        found = decode(ids, 0)
        assert (found.token_ids, found.finished) == (expected.token_ids, expected.finished)
        assert len(forwards) == 1 + found.num_steps, "the prefill and the steps"
        assert sum(found.accepted) < len(found.token_ids)
        if name == "generate":
            assert found.accepted == [1] * (len(found.token_ids) - 1)
    hook.remove()


def test_text_that_repeats_is_looked_up(model):
    plain, ids = plain_decoder(model, eos_token_ids=()), RANDOM[0]
    for _ in range(3):  # let the target write on until its text repeats
        ids = ids + plain.generate(ids, 40).token_ids
    found = baseline("prompt-lookup", model, (), 30)(ids, 0)
    assert found.token_ids == plain.generate(ids, 30).token_ids
    assert len(found.token_ids) == 30 and max(found.accepted) > 1


def test_the_target_s_own_generation_settings_do_not_apply(model, monkeypatch):
    own = GenerationConfig(repetition_penalty=50.0, min_new_tokens=15, do_sample=True)
    monkeypatch.setattr(model, "generation_config", own)
    found = baseline("generate", model, EOS, 20)(RANDOM[1], 0)
    plain = plain_decoder(model, eos_token_ids=EOS)
    assert found.token_ids == plain.generate(RANDOM[1], 20).token_ids


def test_a_baseline_that_cannot_decode_says_so_in_one_line(model, monkeypatch):
    def broken(*arguments, **more):
        raise ValueError("not with this cache\nmore")

    decode = baseline("generate", model, EOS, 4)
    assert decode(RANDOM[0], 0).token_ids
    monkeypatch.setattr(model, "generate", broken)
    with pytest.raises(CannotDecode, match=r"^not with this cache more$"):
        decode(RANDOM[0], 0)
