"""Rows of tables, each an object by column: CSV and TSV by their header, Parquet, Arrow and Hub
data sets in small batches.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.conversations import text_rows
from pipeline.conversations.conversation import Reason
from pipeline.conversations.forms import KNOWN_KEYS
from pipeline.conversations.text_rows import TOO_LONG, decoded, raw_lines, unreadable
from pipeline.errors import ConfigError, DataError, EnvironmentFault

BATCH_ROWS = 64
MAX_COLUMNS_SHOWN = 20


def select_columns(names: Sequence[str], wanted: Sequence[str], where: str) -> list[str]:
    """The columns to read: the wanted ones, or else those that a form knows, or else the first.

    Raises:
        ConfigError: A wanted column is not there.
    """
    for name in wanted:
        if name not in names:
            shown = ", ".join(f"`{name[:40]}`" for name in names[:MAX_COLUMNS_SHOWN])
            what = f"There is no column `{name}`; the columns are {shown or 'none'}."
            fix = "Correct seeds.sources[].columns; a CSV or TSV file names its columns in line 1."
            raise ConfigError(what, where, fix)
    known = [name for name in names if name in (wanted or KNOWN_KEYS)]
    return known or list(names[:MAX_COLUMNS_SHOWN])


def delimited_rows(
    file: io.BufferedReader, path: Path, columns: Sequence[str], delimiters: str
) -> Iterator[Any]:
    """The records of a CSV or TSV file by the names in its first line.

    The delimiter is the most frequent one of that line. A record with another number of fields than
    the header is rejected alone.

    Raises:
        ConfigError: A column of `columns` is not there.
        DataError: The first line is no header.
    """
    csv.field_size_limit(text_rows.MAX_ROW_BYTES)
    texts = map(_line_text, raw_lines(file))
    try:
        first = next(texts, "").removeprefix("\ufeff")
        delimiter = max(delimiters, key=first.count)
        header = next(csv.reader([first], delimiter=delimiter), [])
    except csv.Error as error:  # a line end of old, or a name above the limit
        fix = "Write the names of the columns in one line, and end lines with a line feed."
        raise DataError(f"The first line names no columns: {error}.", str(path), fix) from error
    select_columns(header, columns, str(path))
    records = csv.reader(texts, delimiter=delimiter)
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            broken = unreadable(Reason.BROKEN_ROW, f"It is no record: {error}.")
            yield TOO_LONG if "field larger" in str(error) else broken
            continue
        if len(record) == len(header):
            yield dict(zip(header, record, strict=True))
        elif record:
            detail = f"It has {len(record)} fields, and the header names {len(header)} columns."
            yield unreadable(Reason.BROKEN_ROW, detail, delimiter.join(record))


def _line_text(line: bytes | None) -> str:
    if line is None:
        raise csv.Error("field larger than a row may be")  # costs the record that the line is in
    return decoded(line)


def table_rows(path: Path, columns: Sequence[str], max_bytes: int) -> Iterator[Any]:
    """The rows of a Parquet or Arrow (Feather) file, or of an Arrow stream, as of `datasets`.

    Raises:
        ConfigError: A column of `columns` is not there.
        DataError: The file is damaged, or holds more than `max_bytes`, unpacked.
    """
    try:
        with pa.memory_map(os.fsencode(path)) as file:  # Arrow takes no str that is not UTF-8
            parquet = file.read(4) == b"PAR1"
            file.seek(0)
            read_batches = _parquet_batches if parquet else _arrow_batches
            yield from _rows(read_batches(file, columns, str(path)), path, max_bytes)
    except (ConfigError, DataError):
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # of the file system
        what = f"The file is damaged, or is no such table: {' '.join(str(error).split())[:200]}"
        raise DataError(what, str(path), "Copy or download it again.") from error


def _parquet_batches(
    file: pa.NativeFile, columns: Sequence[str], where: str
) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(file, pre_buffer=False, buffer_size=text_rows.CHUNK_BYTES) as reader:
        wanted = select_columns(reader.schema_arrow.names, columns, where)
        yield from reader.iter_batches(BATCH_ROWS, columns=wanted, use_threads=False)


def _arrow_batches(
    file: pa.NativeFile, columns: Sequence[str], where: str
) -> Iterator[pa.RecordBatch]:
    try:
        reader = pa.ipc.open_file(file)
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    except pa.ArrowInvalid:
        reader = pa.ipc.open_stream(file)
        batches = iter(reader)
    wanted = select_columns(reader.schema.names, columns, where)
    for batch in batches:
        yield batch.select(wanted)


def too_large(path: Path, max_bytes: int) -> DataError:
    """The refusal of a file that holds more than `seeds.max_file_gb`, unpacked."""
    what = f"The file holds more than {max_bytes / 1e9:,.3g} GB, unpacked."
    return DataError(what, str(path), "Split it, or raise seeds.max_file_gb.")


def _rows(batches: Iterator[pa.RecordBatch], path: Path, max_bytes: int) -> Iterator[Any]:
    """The rows of batches.

    A batch is validated before anything is asked of it, even its size: a wrong offset is read
    beyond the file's memory.
    """
    left = max_bytes
    for batch in batches:
        valid = _is_valid(batch)
        size = BATCH_ROWS if valid else 1
        for start in range(0, len(batch), size):
            part = batch.slice(start, size)
            if not valid and not _is_valid(part):
                yield unreadable(Reason.UNDECODABLE, "It has bytes that are not UTF-8.")
                continue
            left -= part.nbytes
            if left < 0:
                raise too_large(path, max_bytes)
            yield from _values(part)


def _is_valid(batch: pa.RecordBatch) -> bool:
    """Whether all texts are UTF-8; raises ArrowInvalid where anything else is wrong."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if "utf8" in str(error).lower():
            return False
        raise
    return True


def _values(part: pa.RecordBatch) -> Iterator[Any]:
    """The rows of a valid batch, each by itself where one is too long or no value of Python's."""
    problem = TOO_LONG
    if part.nbytes <= text_rows.MAX_ROW_BYTES:
        try:
            yield from part.to_pylist()
            return
        except (ValueError, ArithmeticError) as error:
            problem = unreadable(Reason.UNDECODABLE, f"It cannot be read: {error}.")
    if len(part) == 1:
        yield problem
        return
    for number in range(len(part)):
        yield from _values(part.slice(number, 1))


def hub_rows(hub: str, split: str, columns: Sequence[str]) -> Iterator[Any]:
    """The rows of a data set on the Hub, streamed; images and the like are not decoded.

    Raises:
        ConfigError: There is no such data set, split or column.
        EnvironmentFault: It cannot be read now.
    """
    import datasets  # seconds to import, and only some runs read the Hub

    where = f"{hub}, split {split}"
    try:
        found = datasets.load_dataset(hub, split=split, streaming=True)
        if found.column_names is not None:
            found = found.select_columns(select_columns(found.column_names, columns, where))
        yield from found
    except ConfigError:
        raise
    except (datasets.exceptions.DatasetNotFoundError, ValueError) as error:
        what = f"The Hub has no such data set or split: {_first_line(error)}"
        raise ConfigError(what, where, "Correct seeds.sources.") from error
    except Exception as error:  # of the network, the file system or a damaged file
        what = f"The data set cannot be read now: {_first_line(error)}"
        fix = "Check the network, or download it and name its files in seeds.sources."
        raise EnvironmentFault(what, where, fix) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
