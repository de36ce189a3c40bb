"""The split of every conversation (train, calibrate, check), and how many make a shard."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

from pipeline.conversations.conversation import Conversation, RejectedRow

Row: TypeAlias = Conversation | RejectedRow
Split: TypeAlias = tuple[Row, str]

MIN_HELD_OUT = 8
SMALL_SET = 4096  # up to here the held-out rows are counted out exactly, so that small sets have enough of them
NUM_SHARDS = 8  # of a small set: an interruption costs a part of the work, and eight workers have one each
FEWEST_IN_SHARD, MOST_IN_SHARD = 16, SMALL_SET // NUM_SHARDS


def in_shards(rows: Iterable[Split], rows_per_shard: int | Literal["auto"]) -> Iterator[list[Split]]:
    """The rows of one shard after another, in order.

    `auto` makes `NUM_SHARDS` of a small set, of `FEWEST_IN_SHARD` rows or more, so that each holds enough work to fill
    an engine's batch, and shards of `MOST_IN_SHARD` of a larger one. It depends on nothing but the number of rows.
    """
    stream = iter(rows)
    if rows_per_shard == "auto":
        head = list(itertools.islice(stream, SMALL_SET))  # `split_rows` holds as many
        size = min(MOST_IN_SHARD, max(FEWEST_IN_SHARD, -(-len(head) // NUM_SHARDS)))
        stream = itertools.chain(head, stream)
    else:
        size = rows_per_shard
    yield from iter(lambda: list(itertools.islice(stream, size)), [])


def split_rows(rows: Iterable[Row], holdout: float) -> Iterator[Split]:
    """Give every conversation its split: half of `holdout` calibrates, half checks, by the hash of the id.

    A set of up to `SMALL_SET` rows holds out exactly the smallest hashes, at least 8 for each; in a larger one a
    row's own hash decides, and the rows need not be held in memory.
    """
    stream = iter(rows)
    head = list(itertools.islice(stream, SMALL_SET))
    beyond = next(stream, None)
    hashes = sorted(_unit_hash(row.id) for row in head if isinstance(row, Conversation))
    low, high = holdout / 2, holdout
    if beyond is None and hashes:
        each = min(max(MIN_HELD_OUT, round(len(hashes) * holdout / 2)), len(hashes) // 2)
        low, high = hashes[each - 1] if each else -1.0, hashes[2 * each - 1] if each else -1.0
    for row in itertools.chain(head, [] if beyond is None else [beyond], stream):
        place = _unit_hash(row.id)
        yield row, "calibrate" if place <= low else "check" if place <= high else "train"


def _unit_hash(row_id: str) -> float:
    """An id's place in [0, 1)."""
    return int.from_bytes(hashlib.sha256(b"split:" + row_id.encode()).digest()[:8], "big") / 2**64


def other_holdout(fewest: str) -> str:
    """What to do with `seeds.holdout` where this split has too few rows."""
    return f"{'lower' if fewest == 'train' else 'raise'} seeds.holdout"
