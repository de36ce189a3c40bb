"""Read seed conversations: files, directories, .gz, and data sets on the Hub.

Promises: every row is returned exactly once, as a conversation or as a rejected row with its reason, with the id
`source:row`; files are streamed. A file without any conversation is one error that says what was found.

Limit: nothing after a syntax error in a JSON array can be read, so it ends the run; in JSONL it costs one row.
"""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, cast

import ijson
from ijson.common import ObjectBuilder

from pipeline.config import SeedSource
from pipeline.conversations.conversation import UNDECODABLE_MARK, Conversation, Reason, RejectedRow, RowRejected
from pipeline.conversations.formats import EXPECTED, read_row
from pipeline.errors import ConfigError, DataError, EnvironmentFault

SUFFIXES = (".json", ".jsonl", ".txt")
CHUNK_BYTES = 1 << 16
MAX_NESTING = 500  # levels; json.loads fails at about 1,000
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
def _readable(path: Path) -> Iterator[io.BufferedReader | gzip.GzipFile]:
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


def _lines(file: Iterable[bytes]) -> Iterator[str]:
    """The non-blank lines. A NUL counts as undecodable: it comes from UTF-16 or binary data."""
    for line in file:
        if text := line.decode("utf-8", "mark").replace("\0", UNDECODABLE_MARK).strip("\ufeff \t\r\n"):
            yield text


def _json_lines(file: Iterable[bytes]) -> Iterator[Any]:
    """The value of each line; a file whose first line is a single brace may be one object over many lines."""
    lines: Iterable[str] = _lines(file)
    first = list(itertools.islice(lines, 1))
    lines = itertools.chain(first, lines)
    if first == ["{"]:
        lines = list(lines)
        if not isinstance(whole := _json_value("\n".join(lines)), _Unreadable):
            yield whole
            return
    yield from map(_json_value, lines)


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = Reason.UNDECODABLE if UNDECODABLE_MARK in text else Reason.BROKEN_JSON
        return _Unreadable(RowRejected(reason, f"It is not valid JSON: {error}."), text)


def _array(file: io.BufferedReader | gzip.GzipFile, path: Path) -> Iterator[Any]:
    """The items of a JSON array, one at a time."""
    text = codecs.iterdecode(iter(partial(file.read, CHUNK_BYTES), b""), "utf-8-sig", "mark")
    number = 0
    try:
        for item in _items(ijson.basic_parse(ijson.from_iter(chunk.encode() for chunk in text))):
            yield item
            number += 1
    except (ijson.JSONError, ValueError, ArithmeticError) as error:  # the last: an exponent beyond Decimal
        what = f"The JSON array breaks off or is malformed after {number} rows: {' '.join(str(error).split())}."
        fix = "Repair or download it again; as JSONL, a damaged line costs only itself."
        raise DataError(what, str(path), fix) from error


def _items(events: Iterable[tuple[str, Any]]) -> Iterator[Any]:
    """The array's items from parser events; an item that is nested too deeply is not built.

    ijson's own `items` keeps the path to every level as text: for a row of 60,000 brackets it took 9 GB.
    """
    depth, deepest, builder = 0, 0, ObjectBuilder()  # depth: containers around a value
    for event, value in events:
        starts, ends = event.startswith("start_"), event.startswith("end_")
        depth -= ends
        if depth == 1 and not ends:
            deepest, builder = 0, ObjectBuilder()
        if depth and deepest < MAX_NESTING:
            builder.event(event, float(value) if isinstance(value, Decimal) else value)
        depth += starts
        deepest = max(deepest, depth)
        if depth == 1 and not starts:
            too_deep = RowRejected(Reason.BROKEN_JSON, f"It is nested more than {MAX_NESTING} levels deep.")
            yield builder.value if deepest < MAX_NESTING else _Unreadable(too_deep, "")


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
