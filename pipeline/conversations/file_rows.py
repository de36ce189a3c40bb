"""Streaming readers of seed files: text, JSON, CSV and TSV (also gzip), Parquet, Arrow, the Hub.

A row is a parsed value, or a `RejectedRow` if the row cannot be read. Text is UTF-8, or UTF-16 with
a byte order mark. Bytes that cannot be decoded become a lone surrogate, and the row is rejected
later.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.conversations.conversation import Reason, RejectedRow, RowRejected
from pipeline.conversations.forms import FORM_KEYS, KNOWN_KEYS
from pipeline.errors import ConfigError, DataError, EnvironmentFault

CHUNK = 1 << 16
MAX_ROW = 1 << 26  # characters; a gzip file of 2 MB can hold a line of 2 GB
BATCH_ROWS = 64
BLANK = "\ufeff \t\r\n"
GZIP_MAGIC = b"\x1f\x8b"
SPACE = re.compile(r"\s*")
SEPARATOR = re.compile(r"\s*([,\]])")  # after an item of a JSON array


def unreadable_row(reason: Reason, detail: str, text: str = "") -> RejectedRow:
    """Create the `RejectedRow` of an unreadable row, without an id; `SourceReader` sets the id."""
    return RejectedRow.of("", RowRejected(reason, detail), text)


@contextmanager
def open_seed_file(path: Path) -> Iterator[io.BufferedReader]:
    """Context manager: open a seed file for reading bytes, decompressed if it is gzip.

    Errors of reading the file inside the context are translated too.

    Raises:
        DataError: The compressed file is damaged.
        EnvironmentFault: The file cannot be opened or read.
    """
    try:
        with path.open("rb") as file:
            if file.peek(2)[:2] == GZIP_MAGIC:
                yield io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=file)))
            else:
                yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"The compressed file is damaged: {error}.",
            path,
            "Copy or download it again.",
        ) from error
    except OSError as error:
        raise EnvironmentFault(
            f"The seed file cannot be read: {error.strerror or error}.",
            path,
            "Make it readable, then run the same command again.",
        ) from error


def _surrogate(error: UnicodeError) -> tuple[str, int]:
    """Replace bytes that cannot be decoded by a lone surrogate; an error handler of codecs."""
    assert isinstance(error, UnicodeDecodeError)
    return "\udcff", error.end


codecs.register_error("surrogate", _surrogate)


def _encoding(file: io.BufferedReader) -> str:
    """Return the encoding of a text file by its byte order mark, UTF-8 without one."""
    if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    return "utf-8-sig"


def _decoded_text(file: io.BufferedReader) -> io.TextIOWrapper:
    """Return a text stream of a file; bytes that cannot be decoded become lone surrogates."""
    return io.TextIOWrapper(file, _encoding(file), errors="surrogate")


def _raw_lines(text: io.TextIOWrapper) -> Iterator[str]:
    """Yield a text's lines with their line ends.

    A line of more than `MAX_ROW` characters is yielded in pieces. A NUL, which comes from binary
    data or from UTF-16 without a byte order mark, becomes a lone surrogate, so that the row is
    rejected.
    """
    while line := text.readline(MAX_ROW):
        yield line.replace("\0", "\udc00")


def text_lines(file: io.BufferedReader) -> Iterator[str]:
    """Yield the non-blank lines of a text file, without surrounding white space."""
    for line in _raw_lines(_decoded_text(file)):
        stripped = line.strip(BLANK)
        if stripped:
            yield stripped


def json_rows(file: io.BufferedReader, path: Path) -> Iterator[Any]:
    """Yield the rows of a JSON or JSONL file: the items of an array, or the value of each line.

    A file that begins with `[` is an array. A line that is not JSON is yielded as a `RejectedRow`.

    Raises:
        DataError: An array breaks off, is malformed, or has an item longer than `MAX_ROW`.
    """
    start = file.peek(CHUNK).decode(_encoding(file), "ignore")
    if start.lstrip(BLANK).startswith("["):
        yield from _array_items(_decoded_text(file), path)
        return
    for line in text_lines(file):
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            yield unreadable_row(Reason.BROKEN_JSON, f"It is not valid JSON: {error}.", line)


def _array_items(text: io.TextIOWrapper, path: Path) -> Iterator[Any]:
    """Yield the items of a JSON array, reading the text in chunks.

    After a failed parse the buffer doubles, so that the time is linear in the file's size.

    Raises:
        DataError: The array breaks off, is malformed, or has an item longer than `MAX_ROW`.
    """
    decoder = json.JSONDecoder(strict=False)
    buffer = text.read(CHUNK).lstrip()
    position = 1  # after the opening bracket
    num_items = 0
    closed = False
    while not closed:
        start = SPACE.match(buffer, position).end()  # type: ignore[union-attr]
        separator = None
        if num_items == 0 and buffer.startswith("]", start):
            return
        try:
            item, end = decoder.raw_decode(buffer, start)
            separator = SEPARATOR.match(buffer, end)
        except (ValueError, RecursionError):
            pass
        if separator is not None:
            yield item
            num_items += 1
            position = separator.end()
            closed = separator[1] == "]"
            continue
        unread = buffer[position:]
        more = text.read(max(CHUNK, len(unread)))
        if not more or len(unread) > MAX_ROW:
            break
        buffer = unread + more
        position = 0
    if not closed or buffer[position:].strip() or text.read(CHUNK).strip():
        raise DataError(
            f"The JSON array breaks off or is malformed after {num_items} rows.",
            path,
            "Repair or download it again; as JSONL, a damaged line costs only itself.",
        )


def require_columns(names: Sequence[str], wanted: Sequence[str], where: str | Path) -> None:
    """Raise ConfigError if a table with these columns lacks one of `wanted`.

    `where` is the table in the message.
    """
    for name in wanted:
        if name not in names:
            shown = ", ".join(f"`{name[:40]}`" for name in names[:20])
            raise ConfigError(
                f"There is no column `{name}`; the columns are {shown or 'none'}.",
                where,
                "Correct seeds.sources[].columns; a CSV or TSV file names its columns in line 1.",
            )


def select_columns(schema: pa.Schema, wanted: Sequence[str], where: str | Path) -> list[str]:
    """Return the columns of a table to read: those of `wanted`, else those of known forms.

    All columns are read if none identifies a form, so that the first row names them. Of a form with
    a column per text, all texts are read, so that `unread_texts` finds those that no form reads.

    Raises:
        ConfigError: The table lacks a wanted column.
    """
    require_columns(schema.names, wanted, where)
    found = [form for form, key in FORM_KEYS.items() if key in schema.names]
    if not found and not wanted:
        return schema.names
    texts = []
    if found and found[0] in ("alpaca", "prompts"):
        texts = [field.name for field in schema if field.type in (pa.string(), pa.large_string())]
    return [name for name in schema.names if name in (wanted or (*KNOWN_KEYS, *texts))]


def delimited_rows(
    file: io.BufferedReader, path: Path, columns: Sequence[str], delimiters: str = ",;\t|"
) -> Iterator[Any]:
    """Yield the rows of a CSV or TSV file as dicts from the header's column names to texts.

    The delimiter is the most frequent of `delimiters` in the first line. Blank lines are skipped. A
    record that cannot be parsed, or that has more or fewer fields than the header, is yielded as a
    `RejectedRow`. The field size limit of the csv module is raised for the whole process.

    Raises:
        ConfigError: The header lacks one of `columns`.
        DataError: The header cannot be parsed.
    """
    csv.field_size_limit(MAX_ROW)
    text = _decoded_text(file)  # held until the last record: the file closes with it
    lines = _raw_lines(text)
    first = next(lines, "")
    delimiter = max(delimiters, key=first.count)
    records = csv.reader(itertools.chain([first], lines), delimiter=delimiter)
    try:
        header = next(records)
    except csv.Error as error:  # a quotation mark that is never closed
        raise DataError(
            f"The header is no record: {error}.",
            path,
            "Close its quotation mark, or name another file.",
        ) from error
    require_columns(header, columns, path)
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except csv.Error as error:  # a quotation mark that is never closed
            yield unreadable_row(Reason.BROKEN_ROW, f"It is no record: {error}.")
            continue
        if len(record) == len(header):
            yield dict(zip(header, record, strict=True))
        elif record:
            detail = f"It has {len(record)} fields, and the header names {len(header)} columns."
            yield unreadable_row(Reason.BROKEN_ROW, detail, delimiter.join(record))


def table_rows(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the rows of a file in Parquet, Arrow (Feather) or Arrow stream format, as dicts.

    Only the columns that `select_columns` selects are read. An unreadable row is yielded as a
    `RejectedRow`.

    Raises:
        ConfigError: The file lacks one of `columns`.
        DataError: The file is damaged, or has none of these formats.
        OSError: The file cannot be opened or read.
    """
    try:
        with pa.memory_map(os.fsencode(path)) as file:  # Arrow takes no str that is not UTF-8
            parquet = file.read(4) == b"PAR1"
            file.seek(0)
            read_batches = _parquet_batches if parquet else _arrow_batches
            for batch in read_batches(file, columns, path):
                yield from _batch_rows(batch)
    except ConfigError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # of the file system
        raise DataError(
            f"The file is damaged, or is no such table: {' '.join(str(error).split())[:200]}",
            path,
            "Copy or download it again.",
        ) from error


def _parquet_batches(
    file: pa.NativeFile, columns: Sequence[str], path: Path
) -> Iterator[pa.RecordBatch]:
    """Yield record batches of a Parquet file, with the columns that `select_columns` selects."""
    with pq.ParquetFile(file, pre_buffer=False, buffer_size=CHUNK) as reader:
        wanted = select_columns(reader.schema_arrow, columns, path)
        yield from reader.iter_batches(BATCH_ROWS, columns=wanted, use_threads=False)


def _arrow_batches(
    file: pa.NativeFile, columns: Sequence[str], path: Path
) -> Iterator[pa.RecordBatch]:
    """Yield record batches of an Arrow file or stream, with the columns of `select_columns`."""
    try:
        reader = pa.ipc.open_file(file)
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    except pa.ArrowInvalid:
        reader = pa.ipc.open_stream(file)
        batches = iter(reader)
    wanted = select_columns(reader.schema, columns, path)
    for batch in batches:
        yield batch.select(wanted)


def _batch_rows(batch: pa.RecordBatch) -> Iterator[Any]:
    """Yield the rows of a record batch as dicts, an unreadable row as a `RejectedRow`.

    The batch is validated first, because a wrong offset would read beyond the file's memory.
    """
    types = {field.name: field.type for field in batch.schema}
    rows: list[Any]
    try:
        batch.validate(full=True)
        rows = []
        for row in batch.to_pylist():
            rows.append({name: _json_value(row[name], kind) for name, kind in types.items()})
    except (ValueError, ArithmeticError, RecursionError) as error:
        if len(batch) > 1:
            for number in range(len(batch)):
                yield from _batch_rows(batch.slice(number, 1))
            return
        rows = [unreadable_row(Reason.UNDECODABLE, f"It cannot be read: {error}.")]
    yield from rows


def _json_value(value: Any, kind: pa.DataType) -> Any:
    """Convert a value of an Arrow column to the JSON value that it was made of.

    A struct has every field of its column, so fields that are null are left out. A map becomes a
    dict, and text of Arrow's JSON type is parsed.
    """
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if isinstance(kind, pa.MapType):
        return {key: _json_value(item, kind.item_type) for key, item in value}
    if isinstance(kind, pa.StructType):
        fields = {name: item for name, item in value.items() if item is not None}
        return {name: _json_value(item, kind.field(name).type) for name, item in fields.items()}
    if isinstance(value, list):
        inner = getattr(kind, "value_type", None)
        return [_json_value(item, inner) for item in value]
    return value


def hub_rows(hub: str, split: str, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the rows of a data set on the Hub as dicts, streamed.

    If the data set states its columns, only those of `select_columns` are read.

    Raises:
        ConfigError: There is no such data set, split or column.
        EnvironmentFault: The Hub or the data set cannot be read.
    """
    import datasets  # seconds to import, and only some runs read the Hub

    where = f"{hub}, split {split}"
    try:
        found = datasets.load_dataset(hub, split=split, streaming=True)
        if found.features is not None:
            schema = found.features.arrow_schema
            found = found.select_columns(select_columns(schema, columns, where))
        for table in found.with_format("arrow").iter(BATCH_ROWS):
            for batch in table.to_batches():
                yield from _batch_rows(batch)
    except ConfigError:
        raise
    except (datasets.exceptions.DatasetNotFoundError, ValueError) as error:
        raise ConfigError(
            f"The Hub has no such data set or split: {_first_line(error)}",
            where,
            "Correct seeds.sources.",
        ) from error
    except Exception as error:  # of the network, the file system or a damaged file
        raise EnvironmentFault(
            f"The data set cannot be read now: {_first_line(error)}",
            where,
            "Check the network, or download it and name its files in seeds.sources.",
        ) from error


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the error's type name if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
