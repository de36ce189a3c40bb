"""Greedy answers compared, and how close two tokens are at a tie."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.artifacts.check_result import Difference, GreedyMatch
from pipeline.config import CheckConfig
from pipeline.evaluation.prompts import Prompt
from pipeline.evaluation.ties import (
    VllmLogits,
    below_best,
    compare,
    logit_change,
    measured_rows,
    native_logit_change,
    tie_tolerance,
)
from pipeline.targets.loading import load_causal_lm
from pipeline.targets.spec import TargetSpec
from pipeline.targets.vllm_logits import LogitAnswer, LogitRequest

TOLERANCE = 0.25
LOGITS = {0: 9.0, 1: 8.875, 2: 8.75, 3: 8.625, 4: -51.0}  # after every prefix


def compared(plain: list[int], other: list[int]):
    asked: list[list[int]] = []

    def below(prefix: list[int], tokens: list[int]) -> list[float]:
        asked.append(prefix)
        return [9.0 - LOGITS[token] for token in tokens]

    prompts = [Prompt("same", [9]), Prompt("row", [7, 8])]
    found = compare(prompts, [[3, 4], plain], [[3, 4], other], below, TOLERANCE)
    return found, asked


@pytest.mark.parametrize(
    ("plain", "other", "is_tie"),
    [
        ([5, 0, 1], [5, 1, 7], True),
        ([5, 1, 1], [5, 2, 7], True),  # the best token is a third one
        ([5, 0, 1], [5, 3, 7], False),
        ([5, 3, 1], [5, 0, 7], False),  # plain decoding's own token is out of reach
        ([5, 0, 1], [5, 4, 1], False),  # 60 below, although the two best are close
    ],
)
def test_a_tie_needs_both_tokens_near_the_best(plain, other, is_tie):
    found, asked = compared(plain, other)
    assert asked == [[7, 8, 5]]
    assert found.match == GreedyMatch(2, 1, int(is_tie), tokens=2 + 2)
    below = [9.0 - LOGITS[plain[1]], 9.0 - LOGITS[other[1]]]
    differing = Difference("row", 1, plain[1:], other[1:], *below)
    assert found.differing == ([] if is_tie else [differing])
    assert found.largest_gap == (None if is_tie else pytest.approx(max(below), rel=1e-2))


@pytest.mark.parametrize("swap", [False, True])
def test_an_answer_past_the_other_s_end_is_no_tie(swap):
    sides = [[5, 1], [5, 1, 0]]
    found, _ = compared(*(sides[::-1] if swap else sides))
    below = (0.0, None) if swap else (None, 0.0)
    assert found.match == GreedyMatch(2, 1, 0, tokens=2 + 3)
    (one,) = found.differing
    assert (one.at, one.plain_below, one.other_below) == (2, *below)


def test_the_distance_is_from_the_target_s_best_next_token(model):
    for prefix in ([0, 5, 9], [3, 200, 17, 41, 2]):
        with torch.inference_mode():
            logits_V = model(torch.tensor([[*prefix, 0, 0]])).logits[0, len(prefix) - 1]
        best = int(logits_V.argmax())
        expected = [0.0, float(logits_V[best] - logits_V[7])]
        assert below_best(model, prefix, [best, 7]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("dtype", "places", "change", "step"),
    [
        (torch.float32, [[{5: 3.0, 6: 2.0}, {5: 3.0, 6: 2.25}, {6: 2.125}]], 0.25, 2**-22),
        (torch.bfloat16, [[{5: 17.0}, {5: 17.0}]], 0.125, 0.125),  # 8 bits from 16 to 32
        (torch.float16, [[{5: -17.0}, {5: -17.0}], [{5: 1.0}, {5: 1.0}]], 2**-6, 2**-6),
    ],
)
def test_the_change_is_at_least_a_rounding_step(dtype, places, change, step):
    assert logit_change(places, dtype) == change
    biggest = max(abs(x) for place in places for each in place for x in each.values())
    assert step == math.ulp(biggest) * 2**52 * torch.finfo(dtype).eps, "one unit in the last place"


def test_the_tolerance_is_twice_the_change_unless_set():
    assert tie_tolerance(0.125, CheckConfig()) == 0.25
    assert tie_tolerance(0.125, CheckConfig(tie_tolerance=0)) == 0


def test_measured_answers_are_of_all_categories_and_have_steps():
    prompts = [Prompt(str(row), [1], "ab"[row % 2]) for row in range(20)]
    rows = measured_rows(prompts, [[1, 2]] * 16 + [[1]] * 4)
    assert len(rows) == 4 and max(rows) < 16 and sorted(row % 2 for row in rows) == [0, 0, 1, 1]
    assert measured_rows(prompts[:2], [[1], [1, 2]]) == [1]


@pytest.mark.parametrize(
    ("spec", "at_least", "at_most"),
    [
        ({}, 0.0, 1e-5),
        ({"dtype": "bfloat16"}, 0.0, 0.1),
        ({"quantization": "8bit"}, 1e-4, 1.0),
        ({"quantization": "4bit"}, 0.0, 1.0),
    ],
)
def test_the_change_covers_plain_decoding_s_forwards(tiny_target, spec, at_least, at_most):
    """Bitsandbytes multiplies 4-bit layers in bfloat16 on CPUs with AVX-512."""
    model = load_causal_lm(TargetSpec(str(tiny_target), **spec), "cpu", 1)
    prompts = [Prompt("a", [5, 6, 7]), Prompt("b", [9])]
    answers = [list(range(10, 40)), list(range(60, 70))]
    found = native_logit_change(model, prompts, answers)
    assert at_least <= found <= at_most
    cache = None
    with torch.inference_mode():
        ids = torch.tensor([[5, 6, 7, *answers[0][:-1]]])
        at_once_TV = model(ids).logits[0]
        for position in range(ids.shape[1]):
            step = model(ids[:, position, None], past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            if position > 2:
                best = at_once_TV[position].argmax()
                moved = (step.logits[0, 0, best] - at_once_TV[position, best]).abs()
                assert moved <= tie_tolerance(found, CheckConfig())


def test_vllm_s_change_and_distances_are_of_its_own_logits():
    """Alone, the text turns after its first token, so that later places are not compared."""
    prompts = [Prompt("a", [1]), Prompt("b", [2])]
    plain = [[5, 6], [7]]
    asked = VllmLogits(prompts, plain, [[[5, 6], [7]], [[5, 8], [7]]])
    at_once, alone, read, differences = asked.batches
    assert [one.prompt_ids for one in (*at_once, *alone, *read)] == [[1], [1], [1], [1, 5]]
    assert differences == [LogitRequest([1, 5], token_ids=[6, 8])]
    found = [
        [LogitAnswer([5, 6], [{5: 3.0, 4: 1.0}, {6: 2.0, 8: 2.0}])],
        [LogitAnswer([5, 8], [{5: 3.0, 4: 1.125}, {6: 2.0, 8: 2.25}])],
        [LogitAnswer([5], [{5: 3.0, 4: 1.0}]), LogitAnswer([6], [{6: 2.0, 8: 1.5}])],
        [LogitAnswer([6], [{6: 2.0, 8: 1.75}])],
    ]
    assert asked.change(found, torch.float32) == 0.75
    assert asked.below_best(found)([1, 5], [6, 8]) == [0.0, 0.25]
