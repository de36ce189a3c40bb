"""Rows of the generate stage on disk: token ids, target-written spans, messages.

Shards of the features stage have the columns of `TokenRow` too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.artifacts.seed_rows import MESSAGES, SPLITS
from pipeline.conversations.conversation import Message
from pipeline.conversations.duplicates import CheckQuestions
from pipeline.conversations.row_builder import GeneratedRow
from pipeline.conversations.spans import Span
from pipeline.errors import DataError
from pipeline.storage.shards import Row, open_shard, read_rows

SPANS = pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32()), ("role", pa.string())]))
GENERATED = pa.schema(
    [
        ("id", pa.string()),
        ("parent_id", pa.string()),  # the seed's id; `id` may add `~<sample>` and `#<turn>`
        ("split", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("spans", SPANS),  # target-written token ranges [start, end)
        ("finish", pa.list_(pa.string())),  # stop | length, one per span
        ("messages", MESSAGES),
    ]
)
StoredSpans = Iterable[Mapping[str, Any]]
TOKEN_COLUMNS = ("id", "parent_id", "split", "input_ids", "spans")
REDO = "Delete this file and run the same command again to rebuild it."


@dataclass(frozen=True)
class TokenRow:
    """A generated conversation as token ids, with the spans that the target wrote."""

    id: str
    parent_id: str
    split: str
    input_ids: npt.NDArray[np.int32]
    spans: list[Span]

    @classmethod
    def of(cls, row: Row) -> TokenRow:
        """Create a token row from a row of a generate or feature shard."""
        ids = np.asarray(row["input_ids"], np.int32)
        return cls(row["id"], row["parent_id"], row["split"], ids, spans_of(row["spans"]))

    def stored(self) -> Row:
        """Return the row as the columns `TOKEN_COLUMNS` of a generate or feature shard."""
        return {
            "id": self.id,
            "parent_id": self.parent_id,
            "split": self.split,
            "input_ids": self.input_ids.tolist(),
            "spans": [asdict(span) for span in self.spans],
        }


def spans_of(stored: StoredSpans) -> list[Span]:
    """Convert the column `spans` of a stored row to `Span` objects."""
    return [Span(**span) for span in stored]


def generated_columns(row: GeneratedRow, split: str) -> Row:
    """Return a generated row and its split as the columns of `GENERATED`."""
    tokens = TokenRow(row.id, row.parent_id, split, np.asarray(row.input_ids), row.spans)
    messages = [asdict(message) for message in row.messages]
    return {**tokens.stored(), "finish": row.finish, "messages": messages}


def count_generated(rows: Iterable[Row]) -> dict[str, float]:
    """Count the target-written `tokens` and `turns` of generated rows, and the rows of each split.

    A target-written span is one turn. The key of a split's rows is `<split>_rows`.
    """
    counts = dict.fromkeys(("tokens", "turns", *(f"{split}_rows" for split in SPLITS)), 0.0)
    for row in rows:
        counts["tokens"] += sum(span["end"] - span["start"] for span in row["spans"])
        counts["turns"] += len(row["spans"])
        counts[f"{row['split']}_rows"] += 1
    return counts


def read_token_rows(
    shards: Iterable[Path], fingerprint: str, vocab_size: int | None = None
) -> Iterator[TokenRow]:
    """Yield the token rows of generate or feature shards, in order.

    `input_ids` are read-only views of Arrow buffers.

    Args:
        fingerprint: The fingerprint that the shards must have.
        vocab_size: If given, token ids must be below it.

    Raises:
        DamagedShard: A shard is missing or damaged.
        DataError: A shard has another fingerprint, or a token id is too large.
        EnvironmentFault: The file system cannot read a shard.
    """
    for path in shards:
        with open_rows(path, fingerprint) as shard:
            for group in range(shard.num_row_groups):
                table = shard.read_row_group(group, columns=TOKEN_COLUMNS)
                others = table.drop_columns("input_ids").to_pylist()
                for row, tokens in zip(others, table["input_ids"], strict=True):
                    ids = tokens.values.to_numpy()
                    if vocab_size is not None and np.max(ids, initial=0) >= vocab_size:
                        raise DataError(
                            f"A token is outside the target's vocabulary of {vocab_size}.",
                            f"{path}, row {row['id']}",
                            REDO,
                        )
                    yield TokenRow.of({**row, "input_ids": ids})


@contextlib.contextmanager
def open_rows(path: Path, fingerprint: str) -> Iterator[pq.ParquetFile]:
    """Context manager that opens a generate or feature shard and checks its fingerprint.

    Raises:
        DamagedShard: The shard is missing or damaged.
        DataError: The shard has another fingerprint.
        EnvironmentFault: The file system cannot read the shard.
    """
    with open_shard(path) as shard:
        found = (shard.schema_arrow.metadata or {}).get(b"fingerprint", b"none").decode()
        if found != fingerprint:
            raise DataError(
                f"This shard belongs to another run: its fingerprint is {found}, not"
                f" {fingerprint}.",
                path,
                REDO,
            )
        yield shard


def num_contaminated(shards: Iterable[Path], questions: CheckQuestions) -> int:
    """Count the training rows of generate shards that contain a question of the check."""
    found = 0
    for path in shards:
        for row in read_rows(path, ["split", "messages"]):
            messages = [Message(**message) for message in row["messages"]]
            if row["split"] == "train" and any(map(questions.find_question, messages)):
                found += 1
    return found
