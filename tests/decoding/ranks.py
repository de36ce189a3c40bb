"""Held-out text for the tests of walks and searches: ranks as heads could have guessed them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from pipeline.decoding.held_out import HeldOutRanks
from pipeline.heads.accuracy import MISS, NO_LABEL


@st.composite
def held_out(draw, num_heads: int = 3, top: int = 3, least: int = 1) -> HeldOutRanks:
    """`least` to 6 spans of 1 to 9 positions; a head has no label where its token would lie beyond
    the span.
    """
    lengths = draw(st.lists(st.integers(1, 9), min_size=least, max_size=6))
    columns = []
    for length in lengths:
        for place in range(length):
            ranks = draw(
                st.lists(
                    st.sampled_from([*range(top), MISS]), min_size=num_heads, max_size=num_heads
                )
            )
            columns.append(
                [rank if place + head < length else NO_LABEL for head, rank in enumerate(ranks)]
            )
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    conversations = np.sort(
        draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    )
    seen = np.array(draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    return HeldOutRanks(np.array(columns, np.uint8).T, starts, conversations, seen)


def of(ranks_KN: np.ndarray, starts: np.ndarray) -> HeldOutRanks:
    """Spans that are a conversation each."""
    return HeldOutRanks(ranks_KN, starts, np.arange(len(starts)), np.zeros(len(starts), bool))
