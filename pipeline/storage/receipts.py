"""Records of shards and stages: receipts, notes, stage.json, DONE.json; totals of receipts.

A shard's Parquet footer holds its receipt, so that shard and receipt are written together. A note
in another file holds what the footer cannot: the sha256 of the whole file, and the worker's time.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from pipeline.conversations.conversation import Reason
from pipeline.errors import DataError
from pipeline.formatting import counts
from pipeline.storage.atomic import FAILED_ERRORS, JsonObject, read_file, read_json, write_json
from pipeline.storage.fingerprint import FileFacts

RECEIPT_KEY = b"medusa-distill.receipt"
STAGE_FILE, DONE_FILE = "stage.json", "DONE.json"
ENOUGH_TO_JUDGE = 100  # rows; a fraction of fewer is not significant yet

Identity = JsonObject  # what a result depends on
Summary = JsonObject  # what a finished stage reports; each stage has its own keys


@dataclass(frozen=True)
class Note:
    """A record about a shard: its content hash, its file's facts, and its worker's busy time."""

    content_sha256: str
    file: FileFacts
    busy_seconds: float


@dataclass(frozen=True)
class Receipt:
    """The record of a committed shard, stored in the shard's Parquet footer."""

    index: int
    fingerprint: str
    upstream: str  # content hash of the upstream shard; empty if there is none
    num_rows: int
    num_quarantined: int
    ids_sha256: str
    content_sha256: str
    reasons: dict[str, int] = field(default_factory=dict)  # quarantined rows by reason
    stats: dict[str, float] = field(default_factory=dict)  # tokens, positions
    note: Note | None = None  # None if the writer was killed before writing it


@dataclass(frozen=True)
class Description:
    """The content of stage.json: a stage's name, its fingerprint, and the fingerprinted data."""

    stage: str
    fingerprint: str
    identity: Identity = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> Description | None:
        """Read a directory's stage.json; None if the file is absent, unreadable or damaged."""
        return _read_record(DESCRIPTION, directory / STAGE_FILE)

    def write(self, directory: Path) -> None:
        """Write stage.json into a directory, unless the file has this content already."""
        content = json.loads(json.dumps(asdict(self)))
        if read_json(directory / STAGE_FILE) != content:
            write_json(directory / STAGE_FILE, content)


@dataclass(frozen=True)
class Done:
    """The content of DONE.json, which a finished stage has."""

    stage: str
    fingerprint: str
    upstream: dict[str, str]  # content hash of each upstream stage, by name
    shards: list[Receipt]
    files: dict[str, FileFacts]  # by path in the directory
    summary: Summary

    @classmethod
    def read(cls, directory: Path) -> Done | None:
        """Read a directory's DONE.json; None if the file is absent, unreadable or damaged."""
        return _read_record(DONE, directory / DONE_FILE)

    def write(self, directory: Path) -> None:
        """Write DONE.json into a directory."""
        write_json(directory / DONE_FILE, asdict(self))


RECEIPT, NOTE = TypeAdapter(Receipt), TypeAdapter(Note)
DESCRIPTION, DONE = TypeAdapter(Description), TypeAdapter(Done)
Record = TypeVar("Record")


def _read_record(record: TypeAdapter[Record], path: Path) -> Record | None:
    """Read a record from a JSON file; None if the file is absent, unreadable or damaged.

    Raises:
        EnvironmentFault: The file system fails.
    """
    try:
        return record.validate_json(read_file(path), strict=True)
    except (OSError, ValidationError):
        return None


def note_path(shard: Path) -> Path:
    """Return the path of a shard's note."""
    return shard.parent.with_name("receipts") / f"{shard.stem}.json"


def read_receipt(path: Path) -> Receipt | None:
    """Read a shard's receipt, with its note if there is one with the same content hash.

    Return None if the shard is absent, damaged or without a receipt.

    Raises:
        OSError: The file system fails while the shard is read.
        EnvironmentFault: The file system fails while the note is read.
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


def read_note(shard: Path) -> Note | None:
    """Read a shard's note; None if the note is absent, unreadable or damaged.

    Raises:
        EnvironmentFault: The file system fails.
    """
    return _read_record(NOTE, note_path(shard))


class StageTotals:
    """Totals of receipts: shards, rows, quarantined rows by reason, statistics, and the rate."""

    def __init__(self, receipts: Iterable[Receipt] = ()):
        self.shards = self.rows = self.quarantined = 0
        self.reasons: Counter[str] = Counter()
        self.stats: Counter[str] = Counter()
        self._timed_tokens = self._busy_seconds = 0.0
        for receipt in receipts:
            self.add(receipt)

    def add(self, receipt: Receipt) -> None:
        """Add the counts of one receipt."""
        self.shards += 1
        self.rows += receipt.num_rows
        self.quarantined += receipt.num_quarantined
        self.reasons.update(receipt.reasons)
        self.stats.update(receipt.stats)
        if receipt.note and receipt.note.busy_seconds:
            self._timed_tokens += receipt.stats.get("tokens", 0)
            self._busy_seconds += receipt.note.busy_seconds

    def summary(self) -> Summary:
        """Return the totals as a summary for DONE.json.

        `tokens_per_second` is the rate in the workers' busy time. It is left out if no receipt has
        a busy time.
        """
        summary = {
            "rows": self.rows,
            "quarantined": self.quarantined,
            "reasons": dict(self.reasons),
            **dict(sorted(self.stats.items())),
        }
        if self._busy_seconds:
            summary["tokens_per_second"] = round(self._timed_tokens / self._busy_seconds, 1)
        return summary

    def check_quarantine(self, where: Path | str, max_fraction: float, *, final: bool) -> None:
        """Check that the fraction of quarantined rows is at most `max_fraction`.

        Duplicates and contaminated rows are not counted.

        Args:
            where: The stage's directory, or the setting of its input, in the error.
            final: Whether the totals are complete. If not, fewer than `ENOUGH_TO_JUDGE` rows always
                pass.

        Raises:
            DataError: The fraction is above `max_fraction`.
        """
        reasons = Counter(self.reasons)
        for repeated in (Reason.DUPLICATE, Reason.CONTAMINATED):
            del reasons[repeated]
        refused = reasons.total()
        seen = self.rows + refused
        if seen and refused / seen > max_fraction and (final or seen >= ENOUGH_TO_JUDGE):
            top = counts(dict(reasons.most_common(3)))
            raise DataError(
                f"{refused} of {seen} rows were refused, a fraction above"
                f" limits.max_quarantine_fraction = {max_fraction}; top reasons: {top}.",
                where,
                "Correct the input or raise the limit. `run` writes refused rows and the reasons to"
                " the stage's quarantine files, and keeps what it has committed.",
            )
