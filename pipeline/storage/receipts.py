"""What says that a shard exists: the receipt in its footer, and the note beside it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from pipeline.storage.atomic import FAILED_ERRORS, read_file, write_json
from pipeline.storage.checksums import FileFacts

RECEIPT_KEY = b"medusa-distill.receipt"


@dataclass(frozen=True)
class Receipt:
    """A committed shard: `fingerprint` identifies its stage, `upstream` the shard that it was made
    from.
    """

    index: int
    fingerprint: str
    upstream: str  # content hash of the upstream shard; empty where there is none
    num_rows: int
    num_quarantined: int
    ids_sha256: str
    content_sha256: str
    reasons: dict[str, int] = field(default_factory=dict)  # quarantined rows by reason
    stats: dict[str, float] = field(
        default_factory=dict
    )  # what the stage counts: tokens, positions
    note: Note | None = (
        # None where its writer was killed before it, or the file was not written by this receipt
        None
    )


@dataclass(frozen=True)
class Note:
    """The file beside a shard: the shard's facts as it was written, and the seconds that a worker
    was busy with it.
    """

    content_sha256: str
    file: FileFacts
    busy_seconds: float


RECEIPT, NOTE = TypeAdapter(Receipt), TypeAdapter(Note)


def note_path(shard: str | Path) -> Path:
    """Where a shard's note lies: beside the directory of shards, in one of its own."""
    shard = Path(shard)
    return shard.parent.with_name("receipts") / f"{shard.stem}.json"


def read_receipt(path: str | Path) -> Receipt | None:
    """The receipt in a shard's footer with the note that fits it, or None where there is no whole
    shard.

    Raises OSError or EnvironmentFault where the file system fails.
    """
    try:
        with pa.OSFile(os.fsencode(path)) as file:
            metadata = pq.read_metadata(file).metadata or {}
        receipt = RECEIPT.validate_json(metadata[RECEIPT_KEY], strict=True)
    except (OSError, pa.ArrowException, KeyError, ValidationError) as error:
        if getattr(error, "errno", None) in FAILED_ERRORS:
            raise
        return None
    note = read_note(path)
    if note is None or note.content_sha256 != receipt.content_sha256:
        return receipt
    return replace(receipt, note=note)


def read_note(shard: str | Path) -> Note | None:
    """The note beside a shard, or None where its writer was killed before it; raises as
    `read_file`.
    """
    try:
        return NOTE.validate_json(read_file(note_path(shard)), strict=True)
    except (OSError, ValidationError):
        return None


def write_note(shard: str | Path, note: Note) -> None:
    write_json(note_path(shard), asdict(note))
