"""The GPU's benchmark ends in a bounded time, and says what it did not measure."""

from __future__ import annotations

import itertools

from benchmarks import gpu


def test_without_time_everything_is_reported_as_not_measured():
    ages = itertools.count(step=10_000).__next__
    result = gpu.measure(tiny=True, clock=lambda: float(ages()))
    assert not result.claims
    features, decoding, _, training, *others = result.not_measured
    parts = [what.split(":")[0] for what in (features, decoding, training)]
    assert parts == ["features", "decoding", "training"]
    assert len(others) == len(gpu.TINY.vocabularies) * 4
    assert sum(gpu.FULL.seconds.values()) <= 600
