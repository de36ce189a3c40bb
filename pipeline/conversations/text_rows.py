"""Files as rows of text: lines, JSON lines, and the items of a JSON array, all streamed, also from
gzip.

A row of more than `MAX_ROW_BYTES` is rejected unread, and a row that is not JSON is rejected alone.

Limit: after a missing bracket in a JSON array, or one too many, nothing can be read, so that ends
the run.
"""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from pipeline.conversations.conversation import (
    UNDECODABLE_MARK,
    Reason,
    RejectedRow,
    RowRejected,
)
from pipeline.errors import DataError, EnvironmentFault

CHUNK_BYTES = 1 << 16
MAX_ROW_BYTES = 1 << 26  # of a row as it is stored; a packed file of 2 MB can hold a line of 2 GB
MAX_OBJECT_LINES = 10_000  # of one object that is the whole file
BLANK = "\ufeff \t\r\n"
GZIP_MAGIC = b"\x1f\x8b"
OUTSIDE = re.compile(rb'([^\[\]{},"]*+)([\[\]{},"]?)')  # of a JSON string: up to the next mark
IN_STRING = re.compile(rb'([^"\\]*+(?:\\.[^"\\]*+)*+)("?)', re.DOTALL)  # up to its end

codecs.register_error("mark", lambda error: (UNDECODABLE_MARK, cast(UnicodeDecodeError, error).end))


def unreadable(reason: Reason, detail: str, text: str = "") -> RejectedRow:
    """A row that cannot be read as a value, and its text; the reader of the source sets the id."""
    return RejectedRow.of("", RowRejected(reason, detail), text)


TOO_LONG = unreadable(Reason.TOO_LONG, f"More than {MAX_ROW_BYTES:,} bytes.")


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file, unpacked where it is gzip.

    Raises:
        DataError: The compressed file is damaged.
        EnvironmentFault: The file system does not let it be read.
    """
    try:
        with path.open("rb") as file:
            if file.peek(2)[:2] == GZIP_MAGIC:
                unpacked = cast(io.RawIOBase, gzip.GzipFile(fileobj=file))
                yield io.BufferedReader(unpacked, CHUNK_BYTES)
            else:
                yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        what = f"The compressed file is damaged: {error}."
        raise DataError(what, str(path), "Copy or download it again.") from error
    except OSError as error:
        what = f"The seed file cannot be read: {error.strerror or error}."
        fix = "Make it readable, then run the same command again."
        raise EnvironmentFault(what, str(path), fix) from error


def raw_lines(file: io.BufferedReader) -> Iterator[bytes | None]:
    """Each line with its end, None for one of more than `MAX_ROW_BYTES`."""
    while line := file.readline(MAX_ROW_BYTES + 1):
        if len(line) <= MAX_ROW_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(CHUNK_BYTES)
        yield None


def decoded(data: bytes) -> str:
    """Bytes as text, undecodable ones marked. A NUL counts as undecodable: it comes from UTF-16 or
    binary data.
    """
    return data.decode("utf-8", "mark").replace("\0", UNDECODABLE_MARK)


def lines(file: io.BufferedReader) -> Iterator[str | RejectedRow]:
    """The non-blank lines."""
    for line in raw_lines(file):
        text = TOO_LONG if line is None else decoded(line).strip(BLANK)
        if text:
            yield text


def json_rows(file: io.BufferedReader, path: Path) -> Iterator[Any]:
    """The items of a JSON array or the values of JSON lines, depending on the first bracket.

    Raises:
        DataError: The array breaks off.
    """
    begin = file.peek(CHUNK_BYTES)
    if begin.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
        file.read(begin.index(b"[") + 1)
        yield from _array(file, path)
    else:
        yield from _json_lines(file)


def _json_lines(file: io.BufferedReader) -> Iterator[Any]:
    """The value of each line. A file whose first line is a single brace may be one object over many
    lines.
    """
    rows = lines(file)
    head = list(itertools.islice(rows, 1))
    if head == ["{"]:
        head += itertools.islice(rows, MAX_OBJECT_LINES)
        whole = _json_value("\n".join(map(str, head)))
        if not isinstance(whole, RejectedRow):
            yield whole
            return
    for row in itertools.chain(head, rows):
        yield _json_value(row)


def _array(file: io.BufferedReader, path: Path) -> Iterator[Any]:
    """The items of a JSON array after its first bracket."""
    number = 0
    depth = 0
    item = bytearray()
    pieces = _pieces(file)
    for text, mark in pieces:
        item += text
        if mark in (b"[", b"{"):
            depth += 1
        elif mark in (b"]", b"}"):
            depth -= 1
        if depth < 0:
            break
        if depth == 0 and mark == b",":
            yield _item_value(item)
            number += 1
            item.clear()
        else:
            item += mark
        del item[MAX_ROW_BYTES + 1 :]  # one byte too many is enough to reject it
    if item.strip():
        yield _item_value(item)
        number += 1
    if depth >= 0 or any(text.strip() or mark for text, mark in pieces):
        what = f"The JSON array breaks off or is malformed after {number} rows."
        fix = "Repair or download it again; as JSONL, a damaged line costs only itself."
        raise DataError(what, str(path), fix)


def _pieces(file: io.BufferedReader) -> Iterator[tuple[bytes, bytes]]:
    """Cut JSON after each bracket, comma and quotation mark that shapes it, and at most at each
    chunk.

    A parser that reads values as well takes quadratic time for a string over many chunks, and no id
    above 64 bits.
    """
    in_string = False
    rest = b""
    while chunk := file.read(CHUNK_BYTES):
        rest += chunk
        at = 0
        while at < len(rest):
            pattern = IN_STRING if in_string else OUTSIDE
            text, mark = cast(re.Match[bytes], pattern.match(rest, at)).groups()
            if not text and not mark:
                break  # a backslash whose next byte is in the next chunk
            at += len(text) + len(mark)
            in_string ^= mark == b'"'
            yield text, mark
        rest = rest[at:]


def _item_value(item: bytearray) -> Any:
    if len(item) > MAX_ROW_BYTES:
        return TOO_LONG
    return _json_value(decoded(bytes(item)).strip(BLANK))


def _json_value(text: str | RejectedRow) -> Any:
    if isinstance(text, RejectedRow):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = Reason.UNDECODABLE if UNDECODABLE_MARK in text else Reason.BROKEN_JSON
        return unreadable(reason, f"It is not valid JSON: {error}.", text)
