"""Rows of the generate stage on disk: token ids, target-written spans, messages.

Feature shards keep the columns of `TokenRow`.

`open_rows` refuses a shard of another run.
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
REDO = "Delete this file and run the same command again: it is made anew."


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
        """Make a token row from a stored row of a generate or feature shard."""
        ids = np.asarray(row["input_ids"], np.int32)
        return cls(row["id"], row["parent_id"], row["split"], ids, spans_of(row["spans"]))

    def stored(self) -> Row:
        """Return the token row's columns for a generate or feature shard."""
        return {
            "id": self.id,
            "parent_id": self.parent_id,
            "split": self.split,
            "input_ids": self.input_ids.tolist(),
            "spans": [asdict(span) for span in self.spans],
        }


def spans_of(stored: StoredSpans) -> list[Span]:
    """Make spans from the column `spans` of a generated row."""
    return [Span(**span) for span in stored]


def generated_columns(row: GeneratedRow, split: str) -> Row:
    """Return a generated row's columns, as `GENERATED` has them."""
    tokens = TokenRow(row.id, row.parent_id, split, np.asarray(row.input_ids), row.spans)
    messages = [asdict(message) for message in row.messages]
    return {**tokens.stored(), "finish": row.finish, "messages": messages}


def count_generated(rows: Iterable[Row]) -> dict[str, float]:
    """Count the target-written tokens and turns of generated rows, and the rows of each split."""
    counts = dict.fromkeys(("tokens", "turns", *(f"{split}_rows" for split in SPLITS)), 0.0)
    for row in rows:
        counts["tokens"] += sum(span["end"] - span["start"] for span in row["spans"])
        counts["turns"] += len(row["spans"])
        counts[f"{row['split']}_rows"] += 1
    return counts


def read_token_rows(
    shards: Iterable[str | Path], fingerprint: str, vocab_size: int | None = None
) -> Iterator[TokenRow]:
    """Yield the token rows of generate or feature shards, in order.

    Token ids are views of Arrow's memory.

    Raises:
        DamagedShard: A shard cannot be read.
        DataError: A shard is of another run; a token is outside a vocabulary of `vocab_size`.
    """
    for path in shards:
        with open_rows(path, fingerprint) as shard:
            for group in range(shard.num_row_groups):
                table = shard.read_row_group(group, columns=list(TOKEN_COLUMNS))
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
def open_rows(path: str | Path, fingerprint: str) -> Iterator[pq.ParquetFile]:
    """Context manager: open the generated or feature rows of a shard with this fingerprint.

    Raises:
        DamagedShard: It is missing or damaged.
        DataError: It is of another run.
    """
    with open_shard(path) as shard:
        found = (shard.schema_arrow.metadata or {}).get(b"fingerprint", b"none").decode()
        if found != fingerprint:
            raise DataError(
                f"This shard is of another run: its fingerprint is {found}, not {fingerprint}.",
                str(path),
                REDO,
            )
        yield shard


def num_contaminated(shards: Iterable[Path], questions: CheckQuestions) -> int:
    """Count, in files of generated rows, the training rows that contain a question of the check."""
    found = 0
    for path in shards:
        for row in read_rows(path, ["split", "messages"]):
            messages = [Message(**message) for message in row["messages"]]
            if row["split"] == "train" and any(map(questions.find_question, messages)):
                found += 1
    return found
