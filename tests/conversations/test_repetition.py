"""What counts as a loop, and how varied a text is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.conversations.requests import degenerate_loop, distinct_n

PROSE = list(range(1000, 1200))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.lists(st.integers(0, 9), max_size=50),
    st.data(),
)
def test_any_ngram_repeated_often_enough_is_a_loop_wherever_it_breaks_off(ngram, before, data):
    repeats = max(4, -(-32 // len(ngram)))
    broken_off = data.draw(st.integers(0, len(ngram) - 1))
    assert degenerate_loop(before + ngram * repeats + ngram[:broken_off])


@given(st.lists(st.integers(0, 3), max_size=90))
def test_a_loop_is_a_tail_of_32_tokens_in_four_equal_parts_or_more(ids):
    def repeats(period, length):
        return length <= len(ids) and all(
            ids[-i] == ids[-i - period] for i in range(1, length - period + 1)
        )

    assert degenerate_loop(ids) == any(
        repeats(p, max(32, 4 * p)) for p in range(1, len(ids) // 4 + 1)
    )


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [7],
        PROSE,
        PROSE + [7] * 31,  # a rule of dashes
        PROSE + PROSE[:40] * 3,  # a refrain
        [7] * 200 + PROSE[:1],  # a table's border that came to an end
    ],
    ids=["nothing", "one", "prose", "dashes", "refrain", "ended"],
)
def test_ordinary_repetition_is_no_loop(ids):
    assert not degenerate_loop(ids)


def test_distinct_n_is_the_share_of_different_ngrams():
    assert distinct_n([1, 2, 3, 4, 5]) == 1.0
    assert distinct_n([1, 2, 1, 2, 1], n=2) == 2 / 4
    assert distinct_n([5] * 13, n=4) == 1 / 10


@pytest.mark.parametrize("ids", [[], [1], [1, 2, 3, 4]])
def test_a_text_too_short_to_repeat_an_ngram_is_as_varied_as_can_be(ids):
    assert distinct_n(ids) == 1.0
