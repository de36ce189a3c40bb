"""Random ranks of held-out text, for the tests of replays and tree searches."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from pipeline.decoding.held_out import HeldOutRanks
from pipeline.heads.accuracy import MISS, NO_LABEL


@st.composite
def held_out(draw, num_heads: int = 3, top: int = 3, least: int = 1) -> HeldOutRanks:
    """Draw ranks of `least` to 6 spans of 1 to 9 positions, without labels past a span's end."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=least, max_size=6))
    guess = st.sampled_from([*range(top), MISS])
    columns = []
    for length in lengths:
        for place in range(length):
            ranks = draw(st.lists(guess, min_size=num_heads, max_size=num_heads))
            num_labels = min(num_heads, length - place)
            columns.append(ranks[:num_labels] + [NO_LABEL] * (num_heads - num_labels))
    starts = np.cumsum([0, *lengths[:-1]])
    spans = st.tuples(st.integers(0, 3), st.booleans())
    drawn = draw(st.lists(spans, min_size=len(lengths), max_size=len(lengths)))
    conversations, seen = zip(*drawn, strict=True)
    return HeldOutRanks(
        np.array(columns, np.uint8).T, starts, np.sort(conversations), np.array(seen)
    )


def ranks_of(ranks_KN: np.ndarray, starts: np.ndarray) -> HeldOutRanks:
    """Build ranks whose spans are one conversation each."""
    return HeldOutRanks(ranks_KN, starts, np.arange(len(starts)), np.zeros(len(starts), bool))
