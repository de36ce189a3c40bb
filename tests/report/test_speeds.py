"""Ranges of repeats, and which measurements other load has disturbed, from simulated decoding."""

from __future__ import annotations

import random

import pytest

from pipeline.artifacts.check_result import (
    CheckFigures,
    GreedyMatch,
    LoadRow,
    ServedMethod,
    Speed,
    VllmFigures,
)
from pipeline.report.facts import speed_outcomes
from pipeline.report.report import Report
from pipeline.report.speeds import is_disturbed
from pipeline.report.warnings import report_warnings

OVERHEAD = 1.05  # a step with drafts over a plain one


def simulated(seed: int) -> tuple[LoadRow, LoadRow]:
    """Decode 32 unequal answers, each with its own acceptance, one by one and as one batch.

    A step takes the same time for one sequence and for 32, and a batch lasts as long as its longest
    answer.
    """
    chance = random.Random(seed)
    lengths, steps = [], []
    for _ in range(32):
        length, accepts, taken = int(4 * chance.paretovariate(1)), chance.random(), 0
        left = length
        while left > 0:
            left -= 1 + sum(chance.random() < accepts for _ in range(3))
            taken += 1
        lengths.append(length)
        steps.append(taken)
    rows = []
    for requests, plain, drafted in ((1, sum(lengths), sum(steps)), (32, max(lengths), max(steps))):
        speedup = plain / (OVERHEAD * drafted)
        rows.append(
            LoadRow(
                requests=requests,
                acceleration_rate=sum(lengths) / sum(steps),
                speedup=speedup,
                tokens_per_second=100 * speedup,
                range=[99 * speedup, 101 * speedup],
                baseline_tokens_per_second=100.0,
                baseline_range=[99.0, 101.0],
            )
        )
    return rows[0], rows[1]


def test_a_batch_of_unequal_answers_raises_no_false_alarm():
    """Its speedup exceeds the rate in some draws, and is right."""
    num_above = 0
    for seed in range(100):
        one, many = simulated(seed)
        num_above += many.speedup > 1.1 * many.acceleration_rate
        assert not is_disturbed(one)
        match = GreedyMatch(32, 32, 0, 500)
        vllm = VllmFigures(
            acceleration_rate=many.acceleration_rate,
            speedup=many.speedup,
            tokens_per_second=many.tokens_per_second,
            range=many.range,
            baseline_tokens_per_second=100.0,
            baseline_range=many.baseline_range,
            greedy_match=match,
            methods=[ServedMethod(name="heads", greedy_match=match)],
            loads=[one, many],
        )
        report = Report(check=CheckFigures(vllm=vllm, passed=True, failures=[]))
        assert not report_warnings(report)
        assert len(speed_outcomes(report)) == 1
    assert num_above > 5


@pytest.mark.parametrize(("slowed", "is_noticed"), [(1.0, False), (1.5, True)])
def test_plain_steps_that_other_load_slowed_are_noticed(slowed, is_noticed):
    speed = Speed(acceleration_rate=2.0, speedup=slowed * 2.0 / OVERHEAD)
    assert is_disturbed(speed) is is_noticed
    assert not is_disturbed(Speed(acceleration_rate=2.0))
