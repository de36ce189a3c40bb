"""The GPU's benchmark ends in a bounded time, and says what it did not measure."""

from __future__ import annotations

import itertools

import pytest

from benchmarks import gpu
from benchmarks.claims import Claim, Result, in_turns
from benchmarks.deadline import deadlines
from benchmarks.results import write_result, write_table
from pipeline.decoding.decoder import Decoder

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
    sides = {name: (lambda name=name: calls.append(name) or 1.0) for name in "ab"}
    assert in_turns(sides, 5, ends=lambda: len(calls) >= 6) == {"a": [1.0, 1.0], "b": [1.0, 1.0]}
    assert in_turns(sides, 5, ends=lambda: True) == {"a": [1.0], "b": [1.0]}


def test_all_shares_together_are_ten_minutes():
    assert sum(gpu.FULL.seconds.values()) <= 600 and tuple(gpu.FULL.seconds) == PARTS


def test_without_time_everything_is_reported_as_not_measured():
    ages = itertools.count(step=10_000).__next__
    result = gpu.measure(tiny=True, clock=lambda: float(ages()))
    assert not result.claims
    kinds = len(gpu.TINY.vocabularies) * 4
    features, decoding, batch, training, *others = result.not_measured
    assert [what.split(":")[0] for what in (features, decoding, training)] == [
        "features",
        "decoding",
        "training",
    ]
    assert batch == "overhead, 2 texts at once, 2 nodes, tied heads" and len(others) == kinds


@pytest.mark.slow
def test_a_late_part_skips_its_remaining_measurements(monkeypatch):
    """The clock stands until a text was decoded plainly and with one tree; then all time is
    over.
    """
    decoded, generate = [], Decoder.generate

    def counted(*arguments, **options):
        decoded.append(1)
        return generate(*arguments, **options)

    monkeypatch.setattr(Decoder, "generate", counted)
    result = gpu.measure(tiny=True, clock=lambda: 0.0 if len(decoded) < 2 else 10_000.0)
    measured = [claim.what for claim in result.claims]
    assert any(what.startswith("features") for what in measured)
    nodes = [what for what in measured if what.startswith("overhead")]
    late = [
        what
        for what in result.not_measured
        if what.startswith("overhead") and "at once" not in what
    ]
    assert len(nodes) >= 1 and len(nodes) + len(late) == 2 * len(gpu.TINY.tree_nodes) and late
    assert not any(what.startswith("training") for what in measured)


def test_the_table_says_what_was_not_measured(tmp_path):
    write_result(tmp_path, "gpu", Result([Claim("a claim", 0.5)], {}, ["another claim"]), 1.0, 0.5)
    write_table(tmp_path, {"gpu": "never read"})
    assert "| gpu | another claim | not measured | | | |" in (tmp_path / "README.md").read_text()
