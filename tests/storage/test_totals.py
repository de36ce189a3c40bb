"""A stage that refuses too much of its input is stopped; what is left out as a repetition is not
refused. A shard of unknown time is not in the rate.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.conversations.conversation import Reason
from pipeline.errors import DataError
from pipeline.storage.fingerprint import FileFacts
from pipeline.storage.receipts import Note, Receipt, StageTotals


def totals(rows: int, **reasons: int) -> StageTotals:
    """The totals of one shard; `reasons` by the name of the reason."""
    counted = {str(Reason[name]): number for name, number in reasons.items()}
    return StageTotals([Receipt(0, "f", "", rows, sum(reasons.values()), "", "", counted)])


def refuses(found: StageTotals, limit: float, *, final: bool) -> bool:
    try:
        found.check_quarantine("", limit, final=final)
    except DataError:
        return True
    return False


@pytest.mark.parametrize("repeated", ["DUPLICATE", "CONTAMINATED"])
def test_repeated_rows_are_neither_refused_nor_among_the_rows_judged(repeated):
    """40 of 100 rows are refused, whatever else there was."""
    found = totals(60, EMPTY=30, TOO_LONG=10, **{repeated: 900})
    assert refuses(found, 0.39, final=True) and not refuses(found, 0.4, final=True)


def test_fewer_than_a_hundred_rows_are_judged_at_the_end():
    assert refuses(totals(20, EMPTY=80), 0.5, final=False)
    assert not refuses(totals(20, EMPTY=79, DUPLICATE=900), 0.5, final=False)
    assert refuses(totals(20, EMPTY=79), 0.5, final=True)
    assert not refuses(totals(0, DUPLICATE=9), 0.0, final=True)


def test_a_shard_of_unknown_time_does_not_raise_the_rate():
    untimed = Receipt(0, "f", "", 1, 0, "", "", stats={"tokens": 30.0})
    timed = replace(untimed, note=Note("", FileFacts(0, 0, ""), busy_seconds=2.0))
    assert StageTotals([untimed, timed]).summary()["tokens_per_second"] == 15
