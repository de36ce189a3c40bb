"""Two measures of a text's token ids: degenerate loops, and the share of distinct n-grams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MIN_REPEATS = 4
MIN_LOOP_TOKENS = 32  # shorter repetition is ordinary text: a line of dashes, a list, a refrain


def degenerate_loop(ids: Sequence[int]) -> bool:
    """Whether the ids end in one n-gram, of any length, at least 4 times in a row and over at least
    32 tokens.
    """
    tail = np.asarray(ids)
    if len(tail) < MIN_LOOP_TOKENS:
        return False
    longest_period = len(tail) // MIN_REPEATS
    # A loop of period p has the last token p positions earlier too, which leaves few periods to
    # compare.
    before = tail[-2 : -2 - longest_period : -1]
    for period in 1 + np.flatnonzero(before == tail[-1]):
        length = max(MIN_LOOP_TOKENS, MIN_REPEATS * period)
        if np.array_equal(tail[len(tail) - length + period :], tail[len(tail) - length : -period]):
            return True
    return False


def distinct_n(ids: Sequence[int], n: int = 4) -> float:
    """Distinct n-grams over all n-grams; 1.0 for a text too short to have two."""
    total = len(ids) - n + 1
    if total < 2:
        return 1.0
    return len({tuple(ids[start : start + n]) for start in range(total)}) / total
