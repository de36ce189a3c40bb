"""Splits of conversations (train, calibrate, check), and the number of rows per shard.

All conversations with the same first question are in the same split, so that held-out questions are
not trained on. Questions that differ only in case, punctuation and white space count as the same.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from pipeline.conversations.conversation import Conversation, RejectedRow
from pipeline.conversations.duplicates import normalize_text

Split = tuple[Conversation | RejectedRow, str]

MIN_HELD_OUT = 8
ENOUGH_HELD_OUT = 32  # as many as the check decodes by default
SMALL_SET = 4096  # up to this number of rows, held-out rows are counted so that there are enough
NUM_SHARDS = 8  # of a small set: an interruption costs only a part, and eight workers have one each
FEWEST_IN_SHARD = 16
MOST_IN_SHARD = SMALL_SET // NUM_SHARDS


def batch_into_shards(
    rows: Iterable[Split], rows_per_shard: int | Literal["auto"]
) -> Iterator[list[Split]]:
    """Group seed rows into shards, in order; the last shard holds the rows that are left.

    With "auto", a set of up to `SMALL_SET` rows is split into at most `NUM_SHARDS` shards of at
    least `FEWEST_IN_SHARD` rows, so that a shard fills an engine's batch. A larger set is split
    into shards of `MOST_IN_SHARD` rows.
    """
    stream = iter(rows)
    if rows_per_shard == "auto":
        head = list(itertools.islice(stream, SMALL_SET))  # `split_rows` holds as many
        size = min(MOST_IN_SHARD, max(FEWEST_IN_SHARD, math.ceil(len(head) / NUM_SHARDS)))
        stream = itertools.chain(head, stream)
    else:
        size = rows_per_shard
    while shard := list(itertools.islice(stream, size)):
        yield shard


def split_rows(rows: Iterable[Conversation | RejectedRow], holdout: float) -> Iterator[Split]:
    """Yield each seed row with its split, which depends on the hash of its first question.

    Half of the fraction `holdout` is for calibrate, half for check. In a set of up to `SMALL_SET`
    rows, `choose_held_out` chooses the held-out questions; in a larger set the hash alone decides.
    A rejected row gets the split `train`, which is not used.
    """
    stream = iter(rows)
    head = list(itertools.islice(stream, SMALL_SET + 1))
    held_out = None
    if len(head) <= SMALL_SET:
        openings = [first_question(row) for row in head if isinstance(row, Conversation)]
        held_out = choose_held_out(Counter(openings), holdout)
    for row in itertools.chain(head, stream):
        split = "train"
        if isinstance(row, Conversation) and held_out is not None:
            split = held_out.get(first_question(row), "train")
        elif isinstance(row, Conversation):
            place = _unit_hash(first_question(row))
            if place <= holdout:
                split = "calibrate" if place <= holdout / 2 else "check"
        yield row, split


def first_question(conversation: Conversation) -> str:
    """Return the normalized first question of a conversation, which decides the split."""
    return normalize_text(conversation.turns[0].asked[0].content)


def choose_held_out(group_sizes: Mapping[str, int], holdout: float) -> dict[str, str]:
    """Choose the first questions to hold out; return the split of each (calibrate or check).

    Conversations with the same first question form a group. The size of a split is that of
    `held_out_rows`, but at most half of the rows outside the largest group. Each split takes the
    groups that fit into its size, in the order of their hashes. A split with fewer than 8 rows, and
    fewer than its size, then also takes the smallest groups. The largest group is never held out,
    and calibrate leaves at least one group for check.

    Args:
        group_sizes: The number of conversations by normalized first question.
    """
    if not group_sizes:
        return {}
    in_order = sorted(group_sizes, key=_unit_hash)
    largest = max(reversed(in_order), key=group_sizes.__getitem__)
    left = [question for question in in_order if question != largest]
    num_rows = sum(group_sizes.values())
    each = min(held_out_rows(num_rows, holdout), (num_rows - group_sizes[largest]) // 2)
    splits = {}
    for split in ("calibrate", "check"):
        taken = 0
        for question in left:
            if taken + group_sizes[question] <= each:
                splits[question] = split
                taken += group_sizes[question]
        left = [question for question in left if question not in splits]
        # Calibrate leaves one group for check, however few there are.
        left_to_check = 1 if split == "calibrate" else 0
        while taken < min(each, MIN_HELD_OUT) and len(left) > left_to_check:
            smallest = min(left, key=group_sizes.__getitem__)
            left.remove(smallest)
            splits[smallest] = split
            taken += group_sizes[smallest]
    return splits


def held_out_rows(num_rows: int, holdout: float) -> int:
    """Return the number of rows in each held-out split if no first question recurs.

    For more than `SMALL_SET` rows this is an expectation. Otherwise it is at least `MIN_HELD_OUT`,
    and at least the smaller of `ENOUGH_HELD_OUT` and a twentieth of the rows, but at most half.
    """
    each = round(num_rows * holdout / 2)
    if num_rows > SMALL_SET:
        return each
    enough = min(ENOUGH_HELD_OUT, num_rows // 20)
    return min(max(MIN_HELD_OUT, enough, each), num_rows // 2)


def _unit_hash(question: str) -> float:
    """Hash a question to a number from 0 to 1."""
    return int.from_bytes(hashlib.sha256(b"split:" + question.encode()).digest()[:8], "big") / 2**64
