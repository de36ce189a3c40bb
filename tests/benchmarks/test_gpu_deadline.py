"""The GPU's benchmark ends in a bounded time, and says what it did not measure."""

from __future__ import annotations

import itertools

from benchmarks import gpu
from benchmarks.claims import in_turns
from benchmarks.deadline import deadlines

PARTS = ("features", "decoding", "batches", "training", "heads")


def test_a_part_inherits_the_time_left_by_earlier_ones():
    now = [0.0]
    first, second = deadlines({"first": 3, "second": 2}, lambda: now[0]).values()
    passed = []
    for now[0] in (0.0, 2.9, 3.0, 4.9, 5.0):
        passed.append((first(), second()))
    assert passed == [(False, False), (False, False), (True, False), (True, False), (True, True)]
    assert deadlines({"one": 8}, lambda: 0.0)["one"].halfway().at == 4


def test_rounds_end_with_the_deadline_but_not_before_the_first():
    calls = []
    sides = {name: (lambda name=name: calls.append(name) or float(len(calls))) for name in "ab"}
    assert in_turns(sides, 5, ends=lambda: len(calls) >= 6) == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert "".join(calls) == "ababab"
    assert in_turns(sides, 5, ends=lambda: True) == {"a": [9.0], "b": [10.0]}


def test_without_time_everything_is_reported_as_not_measured():
    ages = itertools.count(step=10_000).__next__
    result = gpu.measure(tiny=True, clock=lambda: float(ages()))
    assert not result.claims
    features, decoding, _, training, *others = result.not_measured
    parts = [what.split(":")[0] for what in (features, decoding, training)]
    assert parts == ["features", "decoding", "training"]
    assert len(others) == len(gpu.TINY.vocabularies) * 4
    assert sum(gpu.FULL.seconds.values()) <= 600
