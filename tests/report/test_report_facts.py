"""Headline figures and tables say what the report holds, and nothing that it does not."""

from __future__ import annotations

import pytest

from pipeline.report.facts import headline
from pipeline.report.tables import sizes_table


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (2.1, "; 2.00 expected"),
        (2.21, "; 2.00 expected: +10%, more than 10 % off"),
        (1.7, "; 2.00 expected: -15%, more than 10 % off"),
        (None, "with the tree"),
    ],
)
def test_an_expectation_that_missed_by_more_than_a_tenth_is_flagged(report, measured, says):
    report["tree"]["expected_acceleration_rate"] = 2.0
    report["check"]["native"]["acceleration_rate"] = measured
    assert headline(report)[0].note.endswith(says)


def test_the_sizes_that_were_measured_are_shown_with_what_they_promise(report):
    sizes = [{"nodes": 4, "overhead": 1.25, "expected_acceleration_rate": 2.5, "expected_speedup": 2.0}]
    report["tree"] = {"nodes": 4, "source": "joint", "sizes": sizes}
    table = sizes_table(report)
    assert table.rows == (("4", "1.25x", "2.50", "2.00x"),) and table.note == "The joint search; 4 nodes are used."
    assert sizes_table({"tree": {"nodes": 4}}).rows == ()
