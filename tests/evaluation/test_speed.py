"""Figures of decodings whose figures are known by hand."""

from __future__ import annotations

import math
import statistics

import pytest

from pipeline.artifacts.check_result import Category
from pipeline.artifacts.json_form import to_json
from pipeline.decoding.decoder import Decoded
from pipeline.evaluation.prompts import Prompt
from pipeline.evaluation.speed import (
    baseline_figures,
    by_category,
    speed,
    steps_by_accepted_length,
    take_turns,
)
from pipeline.execution.progress import ProgressReporter


def decoded(accepted: list[int], seconds: float, first: float = 0.1) -> Decoded:
    return Decoded(list(range(1 + sum(accepted))), "length", accepted, first, seconds)


PROMPTS = [Prompt("a", [1]), Prompt("b", [1])]
PLAIN = [decoded([1] * 8, 0.8), decoded([1] * 4, 0.4)]  # 12 steps of 0.1 s
MEDUSA = [
    decoded([3, 1, 4], 0.6, first=0.2),
    decoded([2, 2], 0.4, first=0.3),
]  # 12 tokens in 5 steps of 0.2 s
SLOW = [decoded([3, 1, 4], 5.0, first=0.2), decoded([2, 2], 9.0, first=0.7)]


def test_rates_are_pooled_over_sequences_and_seconds_are_medians_over_repetitions():
    found = speed(
        PROMPTS,
        [{"plain": PLAIN, "accelerated": MEDUSA}, {"plain": PLAIN, "accelerated": SLOW}] * 2,
    )
    assert found.acceleration_rate == pytest.approx(12 / 5)
    assert found.baseline_tokens_per_second == pytest.approx(10.0)
    found = speed(
        PROMPTS, [{"plain": PLAIN, "accelerated": side} for side in (MEDUSA, SLOW, MEDUSA)]
    )
    # Of two answers, bootstrapped: 8/3, 4/2 or both, in 1, 1 and 2 of 4 draws, and widened by the
    # square root of 2.
    draws = [8 / 3, 12 / 5, 12 / 5, 2.0]
    assert to_json(found) == {
        "acceleration_rate": pytest.approx(12 / 5),
        "standard_error": pytest.approx(math.sqrt(2) * statistics.pstdev(draws), rel=0.1),
        "overhead": pytest.approx(0.2 / 0.1),
        "speedup": pytest.approx(1.2),
        "tokens_per_second": pytest.approx(12.0),
        "baseline_tokens_per_second": pytest.approx(10.0),
        "time_to_first_token": pytest.approx(0.25),  # of 0.2, 0.2, 0.2, 0.3, 0.3, 0.7
        "baseline_time_to_first_token": pytest.approx(0.1),
        "time_per_output_token": pytest.approx(0.1),  # of 0.6/8 and 0.4/4, twice each, 5/8 and 9/4
        "baseline_time_per_output_token": pytest.approx(0.1),
    }


def test_a_category_has_the_figures_of_its_own_prompts():
    prompts = [
        Prompt("a", [1], "math"),
        Prompt("b", [1], "writing"),
        Prompt("c", [1], "math"),
        Prompt("d", [1]),
    ]
    one = {
        "plain": [
            decoded([1] * 8, 0.8),
            decoded([1] * 4, 0.8),
            decoded([1] * 2, 0.2),
            decoded([1], 9.0),
        ],
        "accelerated": [
            decoded([4, 4], 0.4),
            decoded([2, 2], 0.4),
            decoded([2], 0.1),
            decoded([1], 9.0),
        ],
    }
    assert [to_json(row) for row in by_category(prompts, [one, one])] == [
        {
            "category": "math",
            "prompts": 2,
            "acceleration_rate": pytest.approx(10 / 3, abs=1e-4),
            "speedup": pytest.approx(2.0, abs=1e-3),
            "tokens_per_second": pytest.approx(20.0),
            "baseline_tokens_per_second": pytest.approx(10.0),
            "baselines": {},
        },
        {
            "category": "writing",
            "prompts": 1,
            "acceleration_rate": pytest.approx(2.0),
            "speedup": pytest.approx(2.0),
            "tokens_per_second": pytest.approx(10.0),
            "baseline_tokens_per_second": pytest.approx(5.0),
            "baselines": {},
        },
    ]


def test_a_category_whose_answers_take_no_step_has_no_figures():
    prompts = [Prompt("a", [1], "math"), Prompt("b", [1], "empty")]
    one = {"plain": [PLAIN[0], decoded([], 0.0)], "accelerated": [MEDUSA[0], decoded([], 0.0)]}
    rows = by_category(prompts, [one])
    assert rows[0].speedup > 0 and rows[1] == Category(category="empty", prompts=1)


def test_another_method_is_measured_against_plain_decoding():
    other = [decoded([2] * 4, 0.4), decoded([1] * 4, 0.2)]  # 12 tokens in 8 steps and 0.6 s
    found = baseline_figures(
        [{"plain": PLAIN, "accelerated": MEDUSA, "generate": other}], "generate"
    )
    assert found.acceleration_rate == pytest.approx(12 / 8)
    assert found.tokens_per_second == pytest.approx(20.0)
    assert found.speedup == pytest.approx(2.0)


def test_methods_take_turns_and_each_prompt_has_its_seed():
    asked = []

    def asks(name):
        return lambda ids, seed: asked.append((name, ids, seed)) or decoded([1], 0.1)

    found = take_turns({"a": asks("a"), "b": asks("b")}, [Prompt("x", [7]), Prompt("y", [8])])
    assert asked == [("a", [7], 0), ("b", [7], 0), ("a", [8], 1), ("b", [8], 1)]
    assert {name: len(answers) for name, answers in found.items()} == {"a": 2, "b": 2}


def test_accepted_lengths_count_the_guesses_beside_the_target_s_own_token():
    assert steps_by_accepted_length(MEDUSA) == [1, 2, 1, 1]  # steps of 1; 2 and 2; 3; 4 tokens


def test_every_prompt_is_counted_once_whatever_the_number_of_methods():
    reports = []
    progress = ProgressReporter(show=reports.append)
    progress.begin("native", 3)
    seen = []

    def decode(ids, seed):
        seen.append(reports[-1].done)
        return decoded([1, 2], 0.1)

    take_turns(
        {"plain": decode, "accelerated": decode},
        [Prompt(str(n), [n]) for n in range(3)],
        progress=progress,
    )
    assert seen == [0, 0, 1, 1, 2, 2] and reports[-1].done == 3
    tokens = 3 * 2 * len(decoded([1, 2], 0.1).token_ids)
    assert reports[-1].note.startswith(f"{tokens} tokens, ")
