"""What the drift of published weights is measured on."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.generated_rows import TokenRow
from pipeline.conversations.spans import Span
from pipeline.evaluation import original
from pipeline.evaluation.original import first_positions

LENGTHS = st.lists(st.lists(st.integers(1, 9), max_size=3), max_size=5)


def row_of(lengths: list[int], name: int = 0) -> TokenRow:
    spans, start = [], 1
    for length in lengths:
        spans.append(Span(start, start + length, "assistant"))
        start += length + 2
    return TokenRow(str(name), str(name), "calibrate", np.zeros(start, np.int32), spans)


@given(LENGTHS, st.integers(1, 40))
def test_the_first_positions_are_measured_and_no_more_than_memory_has_room_for(lengths, most):
    rows = [row_of(each, number) for number, each in enumerate(lengths)]
    places = [(index, place) for index, row in enumerate(rows) for s in row.spans for place in range(s.start, s.end)]
    chosen = first_positions(rows, most)
    found = [(int(row.id), place) for row in chosen for s in row.spans for place in range(s.start, s.end)]
    assert found == places[:most] and all(row.spans for row in chosen)


def test_a_conversation_of_any_length_takes_as_much_memory_as_was_said():
    (row,) = first_positions([row_of([10 * original.MAX_POSITIONS])])
    assert sum(map(len, row.spans)) == original.MAX_POSITIONS
