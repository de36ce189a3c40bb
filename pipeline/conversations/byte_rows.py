"""Rows of text files: lines, JSON lines, and the items of a JSON array. Files are streamed, also
packed ones.

A row of more than `MAX_ROW_BYTES` is refused unread, and a row that is no JSON costs itself alone.

Limit: nothing after a bracket that is missing in a JSON array, or one too many, can be read, so
    that ends the run.
"""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from pipeline.conversations.conversation import UNDECODABLE_MARK, Reason, RowRejected
from pipeline.conversations.json_array import BrokenOff, array_items
from pipeline.errors import DataError, EnvironmentFault

CHUNK_BYTES = 1 << 16
MAX_ROW_BYTES = 1 << 26  # of a row as it is stored; a packed file of 2 MB can hold a line of 2 GB
GZIP_MAGIC = b"\x1f\x8b"

codecs.register_error("mark", lambda error: (UNDECODABLE_MARK, cast(UnicodeDecodeError, error).end))


@dataclass(frozen=True)
class Unreadable:
    """A row that cannot be read as a value, and its text."""

    rejected: RowRejected
    text: str


TOO_LONG = Unreadable(RowRejected(Reason.TOO_LONG, f"More than {MAX_ROW_BYTES:,} bytes."), "")


class _Counted(io.RawIOBase):
    """The bytes of a file, unpacked, up to a limit."""

    def __init__(self, file: io.BufferedIOBase, path: Path, most_bytes: int):
        self._file, self._path, self._most, self._left = file, path, most_bytes, most_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise too_large(self._path, self._most)
        return count


def too_large(path: Path, most_bytes: int) -> DataError:
    """The refusal of a file that holds more than `seeds.max_file_gb`, unpacked."""
    what = f"The file holds more than {most_bytes / 1e9:,.3g} GB, unpacked."
    return DataError(
        what, str(path), "Split it, or raise seeds.max_file_gb where it is meant to be so large."
    )


@contextmanager
def readable(path: Path, most_bytes: int) -> Iterator[io.BufferedReader]:
    """The file's bytes, unpacked.

    Raises:
        DataError: What is packed in it is damaged, or it holds more than `most_bytes`.
        EnvironmentFault: The file system does not let it be read.
    """
    with reading(path), path.open("rb") as file:
        packed = file.peek(2)[:2] == GZIP_MAGIC
        source = cast(io.BufferedIOBase, gzip.GzipFile(fileobj=file)) if packed else file
        yield cast(
            io.BufferedReader, io.BufferedReader(_Counted(source, path, most_bytes), CHUNK_BYTES)
        )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what reading a file raises into errors for users."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"The compressed file is damaged: {error}.", str(path), "Copy or download it again."
        ) from error
    except OSError as error:
        what = f"The seed file cannot be read: {error.strerror or error}."
        raise EnvironmentFault(
            what, str(path), "Make it readable, then run the same command again."
        ) from error


def raw_lines(file: io.BufferedReader) -> Iterator[bytes | None]:
    """Each line with its end, None for one of more than `MAX_ROW_BYTES`."""
    while line := file.readline(MAX_ROW_BYTES + 1):
        if len(line) > MAX_ROW_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(CHUNK_BYTES)
            yield None
        else:
            yield line


def decoded(data: bytes) -> str:
    """Bytes as text, undecodable ones marked. A NUL counts as undecodable: it comes from UTF-16 or
    binary data.
    """
    return data.decode("utf-8", "mark").replace("\0", UNDECODABLE_MARK)


def lines(file: io.BufferedReader) -> Iterator[str | Unreadable]:
    """The non-blank lines."""
    for line in raw_lines(file):
        if line is None:
            yield TOO_LONG
        elif text := _stripped(line):
            yield text


def json_rows(file: io.BufferedReader, path: Path) -> Iterator[Any]:
    """The items of a JSON array or the values of JSON lines, as the first bracket says."""
    if file.peek(CHUNK_BYTES)[:CHUNK_BYTES].removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
        yield from array(file, path)
    else:
        yield from _json_lines(file)


def array(file: io.BufferedReader, path: Path) -> Iterator[Any]:
    """The items of a JSON array, one at a time."""
    number = 0
    try:
        for item in array_items(iter(partial(file.read, CHUNK_BYTES), b""), MAX_ROW_BYTES):
            yield TOO_LONG if item is None else _json_value(_stripped(item))
            number += 1
    except BrokenOff as error:
        what = f"The JSON array breaks off or is malformed after {number} rows: {error}."
        fix = "Repair or download it again; as JSONL, a damaged line costs only itself."
        raise DataError(what, str(path), fix) from error


def _stripped(row: bytes) -> str:
    return decoded(row).strip("\ufeff \t\r\n")


def _json_lines(file: io.BufferedReader) -> Iterator[Any]:
    """The value of each line; a file whose first line is a single brace may be one object over many
    lines.
    """
    rows = lines(file)
    first = list(itertools.islice(rows, 1))
    if first == ["{"]:
        first, size = ["{"], 0
        for line in rows:
            first.append(line)
            if isinstance(line, Unreadable) or (size := size + len(line)) > MAX_ROW_BYTES:
                break
        else:
            if not isinstance(whole := _json_value("\n".join(map(str, first))), Unreadable):
                yield whole
                return
    yield from map(_json_value, itertools.chain(first, rows))


def _json_value(text: str | Unreadable) -> Any:
    if isinstance(text, Unreadable):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = Reason.UNDECODABLE if UNDECODABLE_MARK in text else Reason.BROKEN_JSON
        return Unreadable(RowRejected(reason, f"It is not valid JSON: {error}."), text)
