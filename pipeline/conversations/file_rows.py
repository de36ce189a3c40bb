"""Streaming readers of seed files: text, JSON, CSV and TSV (also gzip).

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
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from pipeline.conversations.conversation import Reason, RejectedRow, RowRejected
from pipeline.errors import ConfigError, DataError, EnvironmentFault

CHUNK = 1 << 16
MAX_ROW = 1 << 26  # characters; a gzip file of 2 MB can hold a line of 2 GB
BLANK = "\ufeff \t\r\n"
GZIP_MAGIC = b"\x1f\x8b"
SPACE = re.compile(r"\s*")
SEPARATOR = re.compile(r"\s*([,\]])")  # after an item of a JSON array


def unreadable_row(reason: Reason, detail: str, text: str = "") -> RejectedRow:
    """Create the `RejectedRow` of an unreadable row, without an id; `SourceReader` sets the id."""
    return RejectedRow.of("", RowRejected(reason, detail), text)


@contextmanager
def open_seed_file(path: Path) -> Iterator[io.BufferedReader]:
    """Context manager that opens a seed file for reading bytes, decompressed if it is gzip.

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
            yield unreadable_row(Reason.BROKEN_JSON, f"The row is not valid JSON: {error}.", line)


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
            f"The header is not a CSV record: {error}.",
            path,
            "Close the quotation mark, or use another file.",
        ) from error
    require_columns(header, columns, path)
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except csv.Error as error:  # a quotation mark that is never closed
            yield unreadable_row(Reason.BROKEN_ROW, f"The row is not a CSV record: {error}.")
            continue
        if len(record) == len(header):
            yield dict(zip(header, record, strict=True))
        elif record:
            detail = f"The row has {len(record)} fields, and the header {len(header)} columns."
            yield unreadable_row(Reason.BROKEN_ROW, detail, delimiter.join(record))
