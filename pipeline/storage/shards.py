"""A shard: one Parquet file of a stage, committed by one rename.

The order is: quarantine file (also when empty), then the shard, then a note beside it. The Parquet
footer carries the receipt (fingerprint, ids, counts, content hash, the upstream shard's content
hash), which identifies the shard; equal content makes equal bytes. The content hash is the sha256
of every page of every column, as they lie in the file before the footer. The note
(`receipts/00017.json`) has what the file itself cannot hold: its sha256, and how long the work
took. Page checksums are written and verified, since a flipped bit would be read back silently.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, cast

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.conversations.conversation import RejectedRow
from pipeline.errors import DamagedShard, EnvironmentFault
from pipeline.storage.atomic import atomic_path, disk_errors, publish, temporary_beside
from pipeline.storage.checksums import FileFacts, HashedFile
from pipeline.storage.fingerprint import ids_digest
from pipeline.storage.receipts import RECEIPT_KEY, Note, Receipt, write_note

Codec = Literal["zstd", "lz4", "none"]
Row = Mapping[str, Any]  # a row's columns by name


class ShardWriter:
    """Write one shard row group by row group, then `commit` it.

    Args:
        quarantine: Where the rejected rows will be.
        footer: More schema metadata (dtype, hidden size, tap point).
        codec: The compression of binary columns, which hold states; the others' is zstd.
    """

    def __init__(
        self,
        path: str | Path,
        quarantine: str | Path,
        schema: pa.Schema,
        *,
        index: int,
        fingerprint: str,
        upstream: str = "",
        footer: dict[str, str] | None = None,
        codec: Codec = "zstd",
    ):
        self.path, self.quarantine_path, self.schema = Path(path), Path(quarantine), schema
        self.index, self.fingerprint, self.upstream = index, fingerprint, upstream
        self.footer, self.codec = footer or {}, codec
        self.ids: list[str] = []
        self.rejected: list[RejectedRow] = []

    def __enter__(self) -> ShardWriter:
        self._temporary = temporary_beside(self.path)
        with contextlib.ExitStack() as undo, disk_errors(self.path):
            undo.callback(self._temporary.unlink, missing_ok=True)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.quarantine_path.parent.mkdir(parents=True, exist_ok=True)
            self._file = HashedFile(self._temporary)
            codecs = {
                leaf: self._codec_of(field)
                for field in self.schema
                for leaf in _leaves(field.name, field.type)
            }
            self._writer = pq.ParquetWriter(
                pa.PythonFile(self._file, mode="w"),
                self.schema.with_metadata({**self.footer, "fingerprint": self.fingerprint}),
                compression=codecs,
                compression_level={leaf: 1 for leaf, codec in codecs.items() if codec == "zstd"},
                use_dictionary=False,
                write_statistics=False,
                write_page_checksum=True,
                # a page ends with the value that fills it; one of 64 MB takes twice as long
                write_batch_size=1,
            )
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Without a commit before it, leave nothing behind."""
        with contextlib.suppress(OSError):
            self._writer.close()
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows as one row group, in their order."""
        if rows:
            self.write_batch(pa.RecordBatch.from_pylist(list(rows), schema=self.schema))

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Append the rows of a batch of the schema as one row group; what it refers to is not read
        later.
        """
        self.ids += batch.column("id").to_pylist()
        with disk_errors(
            self.path
        ):  # a table's pages are written at once, a batch's when the next one comes
            self._writer.write_table(
                pa.Table.from_batches([batch]), row_group_size=max(1, len(batch))
            )

    def _codec_of(self, field: pa.Field) -> Codec:
        """The codec is that of tensors; text and ids always compress."""
        return self.codec if pa.types.is_large_binary(field.type) else "zstd"

    def reject(self, rejected: RejectedRow) -> None:
        self.rejected.append(rejected)

    def commit(
        self,
        stage: str,
        ids_in: Iterable[str] | None,
        stats: dict[str, float] | None = None,
        busy_seconds: float = 0.0,
    ) -> Receipt:
        """Prove that no row was lost, then make the shard exist.

        Args:
            ids_in: The upstream rows' ids; every one must be kept (itself, or as `id#turn`) or
                quarantined, once.
            stats: What of the content is worth counting; no times, for equal content has equal
                stats.
            busy_seconds: How long a worker was busy with the shard.

        Raises:
            AssertionError: A row is missing or stands twice; a defect of the stage, never of the
                data.
        """
        assert len(set(self.ids)) == len(self.ids), f"shard {self.index} of {stage} repeats an id"
        if ids_in is not None:
            self._prove_complete(set(ids_in), stage)
        receipt = Receipt(
            index=self.index,
            fingerprint=self.fingerprint,
            upstream=self.upstream,
            num_rows=len(self.ids),
            num_quarantined=len(self.rejected),
            ids_sha256=ids_digest(self.ids),
            content_sha256=self._file.sha256(),
            reasons=dict(Counter(str(rejected.reason) for rejected in self.rejected)),
            stats=stats or {},
        )
        with atomic_path(self.quarantine_path) as temporary:
            lines = (quarantine_line(rejected, stage) for rejected in self.rejected)
            temporary.write_text("".join(lines), encoding="utf-8")
        said = {name: value for name, value in asdict(receipt).items() if name != "note"}
        self._writer.add_key_value_metadata({RECEIPT_KEY.decode(): json.dumps(said)})
        with disk_errors(self.path):
            self._writer.close()
            self._file.sync()
            facts = FileFacts.of(self._temporary, self._file.sha256())
            publish(self._temporary, self.path)
        note = Note(receipt.content_sha256, facts, float(busy_seconds))
        write_note(self.path, note)
        return replace(receipt, note=note)

    def _prove_complete(self, ids_in: set[str], stage: str) -> None:
        """ids(in) = ids(kept) + ids(quarantined); a split row `<id>#<turn>` counts for its
        parent.
        """

        def owners(ids: Iterable[str]) -> set[str]:
            return {row_id if row_id in ids_in else parent_of(row_id) for row_id in ids}

        rejected = [row.id for row in self.rejected]
        kept = owners(self.ids)
        assert kept | owners(rejected) == ids_in, (
            f"shard {self.index} of {stage} lost a row or made one up"
        )
        assert not kept & set(rejected), (
            f"shard {self.index} of {stage} kept and rejected the same row"
        )


def _leaves(name: str, of: pa.DataType) -> list[str]:
    """The columns that Parquet makes of one."""
    if pa.types.is_list(of):
        return _leaves(f"{name}.list.element", of.value_type)
    if pa.types.is_struct(of):
        return [leaf for field in of for leaf in _leaves(f"{name}.{field.name}", field.type)]
    return [name]


def quarantine_line(rejected: RejectedRow, stage: str) -> str:
    row = {
        "id": rejected.id,
        "stage": stage,
        "reason": str(rejected.reason),
        "detail": rejected.detail,
        "row": rejected.row,
    }
    return json.dumps(row, ensure_ascii=True, default=str) + "\n"


def parent_of(row_id: str) -> str:
    """The seed's id of a row; a split row is `<id>#<turn>`."""
    return row_id.partition("#")[0]


@contextlib.contextmanager
def open_shard(path: str | Path) -> Iterator[pq.ParquetFile]:
    """A shard for reading; every page's checksum is verified as it is read.

    Raises:
        DamagedShard: It is missing or damaged, found here or while the caller reads on.
        EnvironmentFault: The file system refuses to read it.
    """
    try:
        with (
            pa.OSFile(os.fsencode(path)) as file,
            pq.ParquetFile(file, page_checksum_verification=True, pre_buffer=False) as shard,
        ):
            yield shard
    except (OSError, pa.ArrowException) as error:
        if getattr(error, "errno", None) in (
            None,
            errno.ENOENT,
        ):  # Arrow's own findings carry no number
            raise DamagedShard(str(path), str(error)) from error
        raise EnvironmentFault(f"A shard cannot be read: {error}.", str(path)) from error


def read_rows(path: str | Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """A shard's rows in order, one row group in memory at a time."""
    with open_shard(path) as shard:
        for group in range(shard.num_row_groups):
            yield from shard.read_row_group(
                group, columns=list(columns) if columns else None
            ).to_pylist()


def read_footer(path: str | Path) -> dict[str, str]:
    """The schema metadata of a shard (dtype, hidden_size, tap, fingerprint) as text."""
    with pa.OSFile(os.fsencode(path)) as file:
        metadata = cast(dict[bytes, bytes], pq.read_schema(file).metadata or {})
    return {
        key.decode(): value.decode()
        for key, value in metadata.items()
        if not key.startswith(b"ARROW")
    }
