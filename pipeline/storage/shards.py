"""Shards: a stage's Parquet files, each committed by one rename; the tasks of making them.

A commit writes the quarantine file (even if it is empty), then the shard, then its note. The
Parquet footer holds the receipt: fingerprint, counts, the hash of the row ids, and the content
hashes of this shard and of its upstream shard. The content hash is the sha256 of the file up to the
footer: all pages of all columns. Page checksums are written and verified, since a flipped bit would
otherwise not be noticed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.conversations.conversation import Reason, RejectedRow
from pipeline.errors import DamagedShard, EnvironmentFault
from pipeline.storage.atomic import atomic_path, disk_errors, publish, temporary_beside, write_json
from pipeline.storage.fingerprint import FileFacts, ids_digest
from pipeline.storage.receipts import RECEIPT_KEY, Note, Receipt, note_path

Row = Mapping[str, Any]  # a row's columns by name


@dataclass(frozen=True)
class ShardTask:
    """A worker's task of making one shard; it can be pickled."""

    index: int
    shard: Path
    quarantine: Path
    fingerprint: str
    source: Path = Path()  # the upstream shard, if there is one
    upstream: str = ""  # its content hash
    crashing: dict[str, str] = field(default_factory=dict)  # how rows kill workers, by row id
    rows: tuple[int, int] | None = None  # only rows [start, stop), in a search for such rows


def task_rows(task: ShardTask, columns: Sequence[str] | None = None) -> list[Row]:
    """Read a task's rows from its upstream shard, in order, without the rows of `task.crashing`.

    `columns` must include `id`; by default all columns are read. Errors are those of `open_shard`.
    """
    rows = list(read_rows(task.source, columns))
    if task.rows is not None:
        rows = rows[slice(*task.rows)]
    return [row for row in rows if row["id"] not in task.crashing]


class HashedFile(io.FileIO):
    """A file opened for writing that computes the sha256 of its content."""

    def __init__(self, path: Path):
        super().__init__(path, "w")
        self._digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write all bytes of `data`, add them to the hash, and return their number."""
        self._digest.update(data)
        unwritten = memoryview(data)
        while unwritten:
            unwritten = unwritten[super().write(unwritten) :]
        return len(data)

    def sha256(self) -> str:
        """Return the sha256 (hex) of the file's content so far."""
        return self._digest.hexdigest()


class ShardWriter:
    """Context manager that writes a task's shard in row groups; `commit` publishes the shard.

    Without `commit`, no file is left. The rows of `task.crashing` are quarantined.

    Args:
        schema: The columns of the shard, with a string column `id`.
        footer: Schema metadata to store besides the fingerprint, such as dtype and hidden size.
    """

    def __init__(
        self,
        task: ShardTask,
        schema: pa.Schema,
        *,
        footer: dict[str, str] | None = None,
    ):
        self.task, self.path, self.schema = task, task.shard, schema
        self.footer = footer or {}
        self.ids: list[str] = []
        self.rejected: list[RejectedRow] = []
        if task.crashing:
            for row in read_rows(task.source):
                how = task.crashing.get(row["id"])
                if how is not None:
                    self.reject(RejectedRow(row["id"], Reason.KILLED_WORKER, how, row))

    def __enter__(self) -> ShardWriter:
        """Open the shard's temporary file.

        Shards with a large binary column, which holds states, are not compressed: zstd saves 22 %
        of bfloat16 states and takes a third of the speed.
        """
        has_states = any(pa.types.is_large_binary(column.type) for column in self.schema)
        self._temporary = temporary_beside(self.path)
        with contextlib.ExitStack() as undo, disk_errors(self.path):
            undo.callback(self._temporary.unlink, missing_ok=True)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.task.quarantine.parent.mkdir(parents=True, exist_ok=True)
            self._file = HashedFile(self._temporary)
            self._writer = pq.ParquetWriter(
                pa.PythonFile(self._file, mode="w"),
                self.schema.with_metadata({**self.footer, "fingerprint": self.task.fingerprint}),
                compression="none" if has_states else "zstd",
                compression_level=None if has_states else 1,
                use_dictionary=False,
                write_statistics=False,
                write_page_checksum=True,
                # a page ends with the value that fills it; one of 64 MB takes twice as long
                write_batch_size=1,
            )
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the shard's temporary file if it was not committed."""
        with contextlib.suppress(OSError):
            self._writer.close()
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows to the shard as one row group; without rows, append nothing."""
        if rows:
            self.write_batch(pa.RecordBatch.from_pylist(rows, schema=self.schema))

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Append a record batch to the shard as one row group.

        The batch's buffers may be reused after the call.
        """
        self.ids += batch.column("id").to_pylist()
        table = pa.Table.from_batches([batch])  # a batch's pages would be written with the next one
        with disk_errors(self.path):
            self._writer.write_table(table, row_group_size=max(1, len(batch)))

    def reject(self, rejected: RejectedRow) -> None:
        """Record a rejected row, which `commit` writes to the shard's quarantine file."""
        self.rejected.append(rejected)

    def commit(
        self,
        stage: str,
        ids_in: Iterable[str] | None,
        stats: dict[str, float] | None = None,
        busy_seconds: float = 0.0,
    ) -> Receipt:
        """Check that no row was lost, then commit the quarantine file, the shard and its note.

        Args:
            stage: The stage's name, for the quarantine file.
            ids_in: The ids that must be in the shard, unchanged or as rows `id#turn`, or else in
                quarantine. None skips this check.
            stats: Counts of the content, without times, so that equal shards have equal counts.
            busy_seconds: How long a worker was busy with the shard.

        Returns:
            The shard's receipt, with its note.

        Raises:
            AssertionError: A row is missing, unknown or occurs twice, which is a defect of the
                stage.
            EnvironmentFault: The disk is full or fails.
        """
        where = f"shard {self.task.index} of {stage}"
        assert len(set(self.ids)) == len(self.ids), f"{where} repeats an id"
        if ids_in is not None:
            self._check_complete({*ids_in, *self.task.crashing}, where)
        receipt = Receipt(
            index=self.task.index,
            fingerprint=self.task.fingerprint,
            upstream=self.task.upstream,
            num_rows=len(self.ids),
            num_quarantined=len(self.rejected),
            ids_sha256=ids_digest(self.ids),
            content_sha256=self._file.sha256(),  # of the rows; receipt and footer follow
            reasons=dict(Counter(rejected.reason for rejected in self.rejected)),
            stats=stats or {},
        )
        with atomic_path(self.task.quarantine) as temporary:
            lines = [quarantine_line(rejected, stage) for rejected in self.rejected]
            temporary.write_text("".join(lines), encoding="utf-8")
        stored = asdict(receipt)
        del stored["note"]
        self._writer.add_key_value_metadata({RECEIPT_KEY.decode(): json.dumps(stored)})
        with disk_errors(self.path):
            self._writer.close()
            os.fsync(self._file.fileno())
            facts = FileFacts.of(self._temporary, self._file.sha256())
            publish(self._temporary, self.path)
        note = Note(receipt.content_sha256, facts, busy_seconds)
        write_json(note_path(self.path), asdict(note))
        return replace(receipt, note=note)

    def _check_complete(self, ids_in: set[str], where: str) -> None:
        """Assert that each id is in the shard or in its quarantine file, but not in both.

        A row that was split into turns may have some turns in the shard and others in quarantine.
        """
        rejected = [row.id for row in self.rejected]
        kept = _parents(self.ids, ids_in)
        assert kept | _parents(rejected, ids_in) == ids_in, f"{where} lost a row or made one up"
        assert not kept & set(rejected), f"{where} kept and rejected the same row"


def _parents(ids: Iterable[str], ids_in: set[str]) -> set[str]:
    """Return the ids of `ids_in` that row ids come from: `<id>#<turn>` comes from `<id>`."""
    return {row_id if row_id in ids_in else parent_of(row_id) for row_id in ids}


def quarantine_line(rejected: RejectedRow, stage: str) -> str:
    """Return the line of a quarantine file for a rejected row: a JSON object."""
    row = {
        "id": rejected.id,
        "stage": stage,
        "reason": rejected.reason,
        "detail": rejected.detail,
        "row": rejected.row,
    }
    return json.dumps(row, ensure_ascii=True, default=str) + "\n"


def parent_of(row_id: str) -> str:
    """Return `<id>` for a row id `<id>#<turn>`; any other row id is returned unchanged."""
    return row_id.partition("#")[0]


@contextlib.contextmanager
def open_shard(path: Path) -> Iterator[pq.ParquetFile]:
    """Context manager that opens a shard for reading; page checksums are verified.

    Errors of reading the shard inside the context are translated too.

    Raises:
        DamagedShard: The shard is missing or damaged.
        EnvironmentFault: The shard exists, but the file system cannot read it.
    """
    try:
        with (
            pa.OSFile(os.fsencode(path)) as file,
            pq.ParquetFile(file, page_checksum_verification=True, pre_buffer=False) as shard,
        ):
            yield shard
    except (OSError, pa.ArrowException) as error:
        if getattr(error, "errno", None) in (None, errno.ENOENT):  # Arrow's errors have no number
            raise DamagedShard(path, str(error)) from error
        raise EnvironmentFault(f"A shard cannot be read: {error}.", path) from error


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a shard in order, with these columns or else all.

    One row group is in memory at a time. Errors are those of `open_shard`.
    """
    with open_shard(path) as shard:
        for group in range(shard.num_row_groups):
            yield from shard.read_row_group(group, columns=columns).to_pylist()
