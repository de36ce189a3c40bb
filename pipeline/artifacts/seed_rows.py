"""Rows of the seeds stage on disk: one conversation each, with its split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa

from pipeline.conversations.conversation import Conversation, Message
from pipeline.storage.shards import Row, read_rows

SPLITS = ("train", "calibrate", "check")
MESSAGES = pa.list_(
    pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.string()),
            ("tool_calls", pa.string()),
            ("learned", pa.bool_()),
        ]
    )
)
SEEDS = pa.schema(
    [
        ("id", pa.string()),
        ("source_id", pa.string()),  # the id in the seed file; may repeat
        ("category", pa.string()),
        ("split", pa.string()),  # one of SPLITS
        ("messages", MESSAGES),
        ("tools", pa.string()),  # JSON: the functions that the assistant may call
    ]
)


@dataclass(frozen=True)
class SeedRow:
    """A seed conversation and its split, as the seeds stage stores them."""

    conversation: Conversation
    split: str

    @classmethod
    def of(cls, row: Row) -> SeedRow:
        """Create a seed row from a row of a seed shard."""
        messages = tuple(Message(**message) for message in row["messages"])
        conversation = Conversation(
            row["id"], messages, row["source_id"], row["category"], row["tools"]
        )
        return cls(conversation, row["split"])

    def stored(self) -> Row:
        """Return the seed row as the columns of `SEEDS`."""
        return {**asdict(self.conversation), "split": self.split}


def read_seed_rows(shards: Iterable[Path]) -> Iterator[SeedRow]:
    """Yield the rows of seed shards, in order."""
    for path in shards:
        yield from map(SeedRow.of, read_rows(path))


def read_seeds(shards: Iterable[Path], split: str) -> Iterator[Conversation]:
    """Yield the rows of one split of seed shards as conversations, in order."""
    for row in read_seed_rows(shards):
        if row.split == split:
            yield row.conversation


def read_categories(shards: Iterable[Path]) -> dict[str, str]:
    """Return the category of each seed row that has one, by the row's id."""
    found = {}
    for path in shards:
        for row in read_rows(path, ["id", "category"]):
            if row["category"]:
                found[row["id"]] = row["category"]
    return found
