"""Read seed conversations: files, directories, .gz, and data sets on the Hub.

Promises: every row is returned exactly once, as a conversation or as a rejected row with its reason, with the id
`source:row`; files are streamed, in time linear in their size; a row of more than `MAX_ROW_BYTES` is refused unread. A
row that is no JSON costs itself alone. A file without any conversation is one error that says what was found.

Limit: nothing after a bracket that is missing in a JSON array, or one too many, can be read, so that ends the run.
"""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from pipeline.config import SeedSource
from pipeline.conversations.conversation import UNDECODABLE_MARK, Conversation, Reason, RejectedRow, RowRejected
from pipeline.conversations.formats import EXPECTED, read_row
from pipeline.conversations.json_array import BrokenOff, array_items
from pipeline.errors import ConfigError, DataError, EnvironmentFault

SUFFIXES = (".json", ".jsonl", ".txt")
CHUNK_BYTES = 1 << 16
MAX_ROW_BYTES = 1 << 26  # of a row as it is stored; a packed file of 2 MB can hold a line of 2 GB
GZIP_MAGIC = b"\x1f\x8b"
NOT_CONVERSATIONS = {Reason.UNKNOWN_FORMAT, Reason.NOT_TEXT, Reason.BROKEN_JSON, Reason.UNDECODABLE}

codecs.register_error("mark", lambda error: (UNDECODABLE_MARK, cast(UnicodeDecodeError, error).end))


def name_sources(sources: Sequence[SeedSource]) -> list[str]:
    """A short unique name for each source, safe in ids and file names: the file's or data set's, with `-2` if taken."""
    names: list[str] = []
    for source in sources:
        if source.hub:
            last = source.hub.rstrip("/").rpartition("/")[2]
        else:
            file = Path(source.path or "").resolve().name.removesuffix(".gz")
            last = next((file.removesuffix(suffix) for suffix in SUFFIXES if file.endswith(suffix)), file)
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.") or "source"
        candidates = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        names.append(next(name for name in candidates if name not in names))
    return names


def source_files(path: Path) -> list[Path]:
    """The files of a source, sorted: the path itself, or all files below it with a known suffix.

    Raises:
        ConfigError: There is nothing at the path.
        DataError: It is a directory without seed files.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError("There is no such seed file or directory.", str(path), "Correct the path in seeds.sources.")
    inside = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
    visible = (file for file in inside if not any(part.startswith(".") for part in file.parts))
    files = sorted((file for file in visible if file.name.removesuffix(".gz").endswith(SUFFIXES)), key=Path.as_posix)
    if not files:
        what = f"The directory holds no seed files: found none of {', '.join(SUFFIXES)}, plain or as .gz."
        raise DataError(what, str(path), "Name the files themselves, or another directory, in seeds.sources.")
    return [path / file for file in files]


def read_source(source: SeedSource, name: str, *, max_characters: int) -> Iterator[Conversation | RejectedRow]:
    """Each row of a source, under the id `name:row`, rows counted over all its files.

    Raises:
        ConfigError: The source does not exist.
        DataError: One of its files, or the whole data set, holds no conversation data.
        EnvironmentFault: It cannot be read now.
    """
    number = 0
    for where, rows in _streams(source):
        recognised, first_rejected = False, None
        for row in itertools.islice(rows, None if source.limit is None else source.limit - number):
            id = f"{name}:{number}"
            outcome: Conversation | RejectedRow
            if isinstance(row, _Unreadable):
                outcome = RejectedRow.of(id, row.rejected, row.text)
            else:
                outcome = read_row(row, id, source.format, max_characters)
            if isinstance(outcome, RejectedRow):
                first_rejected = first_rejected or outcome
            recognised |= isinstance(outcome, Conversation) or outcome.reason not in NOT_CONVERSATIONS
            number += 1
            yield outcome
        if not recognised:
            found = f"The first row: {first_rejected.detail}" if first_rejected else "It is empty."
            raise DataError(f"There is no conversation data in it. {found}", where, f"Expected {EXPECTED}.")
        if number == source.limit:
            return


def _streams(source: SeedSource) -> Iterator[tuple[str, Iterator[Any]]]:
    """The source's files, or its data set: a name for each and its rows."""
    if source.hub is not None:
        yield source.hub, _hub_rows(source.hub, source.split)
    elif source.path is not None:
        yield from ((str(path), _file_rows(path)) for path in source_files(source.path))


@dataclass(frozen=True)
class _Unreadable:
    """A row that is not valid JSON."""

    rejected: RowRejected
    text: str


Readable = io.BufferedReader | gzip.GzipFile
TOO_LONG = _Unreadable(RowRejected(Reason.TOO_LONG, f"More than {MAX_ROW_BYTES:,} bytes."), "")


def _file_rows(path: Path) -> Iterator[Any]:
    """A file's rows: the lines of a text file, the items of a JSON array or the lines of JSONL, by content."""
    with _readable(path) as file:
        if path.name.removesuffix(".gz").endswith(".txt"):
            yield from _lines(file)
        elif file.peek(CHUNK_BYTES)[:CHUNK_BYTES].removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
            yield from _array(file, path)
        else:
            yield from _json_lines(file)


@contextmanager
def _readable(path: Path) -> Iterator[Readable]:
    """The file's bytes, unpacked."""
    try:
        with path.open("rb") as file:
            if file.peek(2)[:2] == GZIP_MAGIC:
                with gzip.open(file) as unpacked:
                    yield unpacked
            else:
                yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"The compressed file is damaged: {error}.", str(path), "Copy or download it again.") from error
    except OSError as error:
        what = f"The seed file cannot be read: {error.strerror or error}."
        raise EnvironmentFault(what, str(path), "Make it readable, then run the same command again.") from error


def _lines(file: Readable) -> Iterator[str | _Unreadable]:
    """The non-blank lines. A NUL counts as undecodable: it comes from UTF-16 or binary data."""
    while line := file.readline(MAX_ROW_BYTES + 1):
        if len(line) > MAX_ROW_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(CHUNK_BYTES)
            yield TOO_LONG
        elif text := _text(line):
            yield text


def _text(row: bytes) -> str:
    return row.decode("utf-8", "mark").replace("\0", UNDECODABLE_MARK).strip("\ufeff \t\r\n")


def _json_lines(file: Readable) -> Iterator[Any]:
    """The value of each line; a file whose first line is a single brace may be one object over many lines."""
    lines = _lines(file)
    first = list(itertools.islice(lines, 1))
    if first == ["{"]:
        first, size = ["{"], 0
        for line in lines:
            first.append(line)
            if isinstance(line, _Unreadable) or (size := size + len(line)) > MAX_ROW_BYTES:
                break
        else:
            if not isinstance(whole := _json_value("\n".join(map(str, first))), _Unreadable):
                yield whole
                return
    yield from map(_json_value, itertools.chain(first, lines))


def _json_value(text: str | _Unreadable) -> Any:
    if isinstance(text, _Unreadable):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = Reason.UNDECODABLE if UNDECODABLE_MARK in text else Reason.BROKEN_JSON
        return _Unreadable(RowRejected(reason, f"It is not valid JSON: {error}."), text)


def _array(file: Readable, path: Path) -> Iterator[Any]:
    """The items of a JSON array, one at a time."""
    number = 0
    try:
        for item in array_items(iter(partial(file.read, CHUNK_BYTES), b""), MAX_ROW_BYTES):
            yield TOO_LONG if item is None else _json_value(_text(item))
            number += 1
    except BrokenOff as error:
        what = f"The JSON array breaks off or is malformed after {number} rows: {error}."
        fix = "Repair or download it again; as JSONL, a damaged line costs only itself."
        raise DataError(what, str(path), fix) from error


def _hub_rows(hub: str, split: str) -> Iterator[Any]:
    """The rows of a data set on the Hub, streamed."""
    try:
        import datasets
    except ImportError as error:
        raise EnvironmentFault("The package `datasets` is not installed.", hub, "pip install datasets") from error
    try:
        yield from datasets.load_dataset(hub, split=split, streaming=True)
    except (datasets.exceptions.DatasetNotFoundError, ValueError) as error:
        what = f"The Hub has no such data set or split: {_first_line(error)}"
        raise ConfigError(what, f"{hub}, split {split}", "Correct seeds.sources.") from error
    except Exception as error:  # whatever the network, the file system or a damaged file raises below `datasets`
        what = f"The data set cannot be read now: {_first_line(error)}"
        fix = "Check the network, or download it and name its files in seeds.sources."
        raise EnvironmentFault(what, f"{hub}, split {split}", fix) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
