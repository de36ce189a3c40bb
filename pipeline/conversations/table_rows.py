"""Rows of tables: CSV and TSV by their header, Parquet and Arrow in small batches, each row an
object by column.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.conversations import byte_rows
from pipeline.conversations.byte_rows import (
    TOO_LONG,
    Unreadable,
    decoded,
    raw_lines,
    reading,
    too_large,
)
from pipeline.conversations.conversation import Reason, RowRejected
from pipeline.errors import ConfigError, DataError

BATCH_ROWS = 64
DELIMITERS = ",;\t|"
MAX_COLUMNS_SHOWN = 20


def require_columns(named: Collection[str], there: Sequence[str], where: str) -> None:
    """Raise ConfigError where a column that `seeds.sources[].columns` names is not among those that
    are there.
    """
    if missing := [name for name in named if name not in there]:
        shown = ", ".join(f"`{name[:40]}`" for name in there[:MAX_COLUMNS_SHOWN])
        more = (
            f" and {len(there) - MAX_COLUMNS_SHOWN} more" if len(there) > MAX_COLUMNS_SHOWN else ""
        )
        what = f"There is no column `{missing[0]}`; the columns are {shown or 'none'}{more}."
        fix = (
            "Correct seeds.sources[].columns; the first line of a CSV or TSV file must name its"
            " columns."
        )
        raise ConfigError(what, where, fix)


def delimited_rows(
    file: io.BufferedReader, path: Path, named: Collection[str], delimiters: str
) -> Iterator[Any]:
    """The records of a CSV or TSV file under its first line's names; the delimiter most frequent in
    that line counts.

    A record with another number of fields than the header is refused alone.

    Raises:
        DataError: The first line is no header.
    """
    csv.field_size_limit(byte_rows.MAX_ROW_BYTES)
    texts = _Texts(file)
    first = next(texts, "").removeprefix("\ufeff")
    delimiter = max(delimiters, key=first.count)
    try:
        header = next(csv.reader([first], delimiter=delimiter), [])
    except (
        csv.Error
    ) as error:  # a lone carriage return, as old line ends are, or a name above the limit
        fix = "Write the names of the columns in one line, and end lines with a line feed."
        raise DataError(f"The first line names no columns: {error}.", str(path), fix) from error
    require_columns(named, header, str(path))
    records = csv.reader(texts, delimiter=delimiter)
    while True:
        texts.cut = False
        try:
            record = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            broken = Unreadable(RowRejected(Reason.BROKEN_ROW, f"It is no record: {error}."), "")
            yield TOO_LONG if str(error).startswith("field larger than field limit") else broken
            continue
        if texts.cut:
            yield TOO_LONG
        elif len(record) == len(header):
            yield dict(zip(header, record, strict=True))
        elif record:
            detail = f"It has {len(record)} fields, and the header names {len(header)} columns."
            yield Unreadable(RowRejected(Reason.BROKEN_ROW, detail), delimiter.join(record))


class _Texts:
    """The lines of a file as texts; `cut` says that one was too long and is left out."""

    def __init__(self, file: io.BufferedReader):
        self._lines = raw_lines(file)
        self.cut = False

    def __iter__(self) -> _Texts:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.cut |= line is None
        return "\n" if line is None else decoded(line)


def parquet_rows(
    path: Path, named: Collection[str], known: Collection[str], most_bytes: int
) -> Iterator[Any]:
    """The rows of a Parquet file: of the columns that are named, or else of those that are
    known.
    """
    with (
        reading(path),
        _arrow_errors(path),
        pa.OSFile(os.fsencode(path)) as opened,  # Arrow takes no text for a name that is no UTF-8
        pq.ParquetFile(opened, pre_buffer=False, buffer_size=byte_rows.CHUNK_BYTES) as file,
    ):
        names = file.schema_arrow.names
        require_columns(named, names, str(path))
        wanted = [name for name in names if name in (named or known)] or names[:MAX_COLUMNS_SHOWN]
        batches = file.iter_batches(batch_size=BATCH_ROWS, columns=wanted, use_threads=False)
        yield from _rows(batches, path, most_bytes)


def arrow_rows(
    path: Path, named: Collection[str], known: Collection[str], most_bytes: int
) -> Iterator[Any]:
    """The same of an Arrow (Feather) file, or of a stream, as `datasets` stores its tables."""
    with reading(path), _arrow_errors(path), pa.memory_map(os.fsencode(path)) as file:
        try:
            reader = pa.ipc.open_file(file)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            reader = pa.ipc.open_stream(file)
            batches = iter(reader)
        names = reader.schema.names
        require_columns(named, names, str(path))
        wanted = [name for name in names if name in (named or known)] or names[:MAX_COLUMNS_SHOWN]
        yield from _rows((batch.select(wanted) for batch in batches), path, most_bytes)


def _rows(batches: Iterator[pa.RecordBatch], path: Path, most_bytes: int) -> Iterator[Any]:
    """The rows of batches.

    A batch is validated before anything is asked of it, even its size: a wrong offset is read
    beyond the file's memory.
    """
    left = most_bytes
    for batch in batches:
        for start in range(0, len(batch), BATCH_ROWS if (valid := _valid(batch)) else 1):
            part = batch.slice(start, BATCH_ROWS if valid else 1)
            if not valid and not _valid(part):
                yield Unreadable(
                    RowRejected(Reason.UNDECODABLE, "It has bytes that are not UTF-8."), ""
                )
                continue
            left -= part.nbytes
            if left < 0:
                raise too_large(path, most_bytes)
            yield from _values(part)


def _values(part: pa.RecordBatch) -> Iterator[Any]:
    """The rows of a valid batch, each by itself where one is too long or no value of Python's."""
    if part.nbytes <= byte_rows.MAX_ROW_BYTES:
        try:
            yield from part.to_pylist()
            return
        except (ValueError, ArithmeticError) as error:
            if len(part) == 1:
                yield Unreadable(
                    RowRejected(Reason.UNDECODABLE, f"It cannot be read: {error}."), ""
                )
                return
    elif len(part) == 1:
        yield TOO_LONG
        return
    for number in range(len(part)):
        yield from _values(part.slice(number, 1))


def _valid(batch: pa.RecordBatch) -> bool:
    """Whether all texts are UTF-8; raises ArrowInvalid where anything else is wrong."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if "utf8" in str(error).lower():
            return False
        raise
    return True


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    """A file that Arrow cannot read, as an error for users; an OSError with a number is the file
    system's.
    """
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, ConfigError | DataError) or getattr(error, "errno", None):
            raise
        what = f"The file is damaged, or is no such table: {' '.join(str(error).split())[:200]}"
        raise DataError(what, str(path), "Copy or download it again.") from error
