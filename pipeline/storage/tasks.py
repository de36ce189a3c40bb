"""One unit of work: the upstream shard to read, the shard to write, and the rows that are left
out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.conversations.conversation import Reason, RejectedRow
from pipeline.storage.shards import Row, ShardWriter, read_rows


@dataclass(frozen=True)
class ShardTask:
    """Everything that a worker needs to make one shard; picklable."""

    index: int
    source: str  # path of the upstream shard
    upstream: str  # its content hash
    shard: str
    quarantine: str
    fingerprint: str
    poison: dict[str, str] = field(
        default_factory=dict
    )  # ids of rows that kill their worker, and how
    rows: tuple[int, int] | None = (
        None  # only rows [start, stop), while looking for the one that kills the worker
    )
    share: float = 1.0  # of all rows, and so of the time that the shard may take

    @property
    def attempt_log(self) -> Path:
        """Where a worker that hangs writes its stack."""
        return Path(self.shard).parent.with_name("attempts") / f"{self.index:05d}.txt"


def task_rows(task: ShardTask, columns: Sequence[str] | None = None) -> list[Row]:
    """The upstream rows that a worker has to do, in order."""
    rows = list(read_rows(task.source, columns))
    chosen = rows if task.rows is None else rows[slice(*task.rows)]
    return [row for row in chosen if row["id"] not in task.poison]


@contextlib.contextmanager
def shard_writer(task: ShardTask, schema: pa.Schema, **more: Any) -> Iterator[ShardWriter]:
    """A writer of a task's shard, in which the rows that kill their worker are already quarantined.

    `commit` it with the ids of `task_rows` and of `task.poison`.
    """
    with ShardWriter(
        task.shard,
        task.quarantine,
        schema,
        index=task.index,
        fingerprint=task.fingerprint,
        upstream=task.upstream,
        **more,
    ) as writer:
        for row in read_rows(task.source) if task.poison else ():
            if row["id"] in task.poison:
                writer.reject(
                    RejectedRow(row["id"], Reason.KILLED_WORKER, task.poison[row["id"]], row)
                )
        yield writer
