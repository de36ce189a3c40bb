"""Sources of seeds: files, directories, and data sets on the Hub.

Every row that is read is yielded exactly once with the id `source:row`, as a conversation or as a
rejected row. Files are streamed. A source without a conversation is an error.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.config import SeedsConfig, SeedSource
from pipeline.conversations.conversation import Conversation, RejectedRow
from pipeline.conversations.file_rows import (
    delimited_rows,
    json_rows,
    open_seed_file,
    text_lines,
)
from pipeline.conversations.forms import EXPECTED, RowSettings, read_row, unread_texts
from pipeline.conversations.table_rows import hub_rows, table_rows
from pipeline.errors import ConfigError, DataError

Row = Conversation | RejectedRow

TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")
OTHER_COLUMNS = 'name other columns as "seeds.sources=[{path: FILE, columns: {prompt: question}}]"'
SUFFIXES = (".jsonl", ".ndjson", ".json", ".txt", ".csv", ".tsv", *TABLE_SUFFIXES)
TABLE_MAGIC = (b"PAR1", b"ARROW1")
# Files that describe a folder; by their suffix alone, their lines would be read as prompts.
DESCRIPTIONS = re.compile(
    r"(readme|licen[cs]e|notice|copying|authors|changelog|citation|contributing|credits|requirements|robots)"
    r"([._-].*)?\.txt(\.gz)?",
    re.IGNORECASE,
)


@dataclass
class FileCount:
    """The numbers of rows and of conversations that were read from a seed file or data set."""

    name: str
    rows: int = 0
    conversations: int = 0


def plain_suffix(name: str) -> str:
    """Return a file's suffix in lower case, ignoring `.gz`; empty if it is not in `SUFFIXES`."""
    suffix = Path(name.lower().removesuffix(".gz")).suffix
    return suffix if suffix in SUFFIXES else ""


def name_sources(sources: Sequence[SeedSource]) -> list[str]:
    """Return a unique short name for each seed source, safe in ids and file names.

    The name is the last part of the path or of the Hub id, without the suffix of a seed file.
    Characters other than ASCII letters, digits, `.`, `_` and `-` become `-`. If the name is taken,
    a number is appended (`-2`, `-3`).
    """
    names = []
    for source in sources:
        last = Path(source.hub or source.path or "").name
        suffix = plain_suffix(last)
        if suffix:
            last = last[: last.lower().rindex(suffix)]
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.") or "source"
        name, number = stem, 1
        while name in names:
            number += 1
            name = f"{stem}-{number}"
        names.append(name)
    return names


@dataclass
class SourceReader:
    """Reader of one seed source's rows.

    Args:
        name: The source's unique name, the prefix of row ids.
        other_columns: What an error advises if no row is a conversation.

    Attributes:
        read: The counts of each file or data set of the last iteration.
        unread: The numbers of rows whose text in a column is not read, see `unread_texts`.
    """

    source: SeedSource
    name: str
    other_columns: str = OTHER_COLUMNS
    read: list[FileCount] = field(default_factory=list)
    unread: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        source = self.source
        self._settings = RowSettings(source.format, source.columns)
        self._columns = tuple((source.columns or {}).values())

    def files(self) -> list[Path]:
        """Return the source's seed files: the path itself, or the files below it, sorted.

        Empty for a data set on the Hub.

        Raises:
            ConfigError: There is nothing at the path.
            DataError: The path is a directory without seed files.
        """
        path = self.source.path
        if path is None:
            return []
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise ConfigError(
                "There is no such seed file or directory.",
                path,
                "Correct the path in seeds.sources; {hub: OWNER/NAME} is a data set on the Hub.",
            )
        files = [file for file in sorted(path.rglob("*"), key=str) if _is_seed_file(file, path)]
        if not files:
            raise DataError(
                f"The directory holds no seed files ({', '.join(SUFFIXES)}).",
                path,
                "Set seeds.sources to the files themselves.",
            )
        return files

    def __iter__(self) -> Iterator[Row]:
        """Yield the source's rows, at most `source.limit`, with the ids `name:row`.

        Rows are numbered over all files.

        Raises:
            ConfigError: The source does not exist, or lacks a column of the configuration.
            DataError: The source was read to its end and holds no conversation, a directory holds
                no seed file, or a file is damaged.
            EnvironmentFault: The source cannot be read.
        """
        return itertools.islice(self._source_rows(), self.source.limit)

    def warnings(self) -> list[str]:
        """Return a warning for each column whose texts the last iteration did not read."""
        num_rows = sum(count.conversations for count in self.read)
        found = []
        for (column, asked), number in self.unread.most_common():
            columns = f"{{instruction: {asked}, input: {json.dumps(column, ensure_ascii=False)}}}"
            found.append(
                f"`{column[:40]}` has text in {number:,} of {num_rows:,} rows of {self.name} and is"
                " not read. To append it to the question, add this to the source in"
                f" seeds.sources: columns: {columns}."
            )
        return found

    def _source_rows(self) -> Iterator[Row]:
        """Parse and yield the source's rows, and count them in `read`.

        Raises:
            DataError: No row is a conversation.
        """
        self.read = []
        self.unread.clear()
        found_one = False
        what = "This source is empty."
        number = 0
        for count, rows in self._raw_rows():
            self.read.append(count)
            for row in rows:
                outcome = self._parse_row(row, number)
                if isinstance(outcome, Conversation):
                    found_one = True
                    count.conversations += 1
                    self.unread.update(unread_texts(row, self._settings))
                elif number == 0:
                    what = f"No row is a conversation. The first one: {outcome.detail}"
                count.rows += 1
                number += 1
                yield outcome
        if not found_one:
            where = self.source.path or self.source.hub or ""
            raise DataError(what, where, f"Expected {EXPECTED}; {self.other_columns}.")

    def _raw_rows(self) -> Iterator[tuple[FileCount, Iterator[Any]]]:
        """Yield the raw rows of each seed file or of the data set, with a count of zero rows."""
        path, hub = self.source.path, self.source.hub
        if hub is not None:
            yield FileCount(hub), hub_rows(hub, self.source.split, self._columns)
        for file in self.files():
            name = file.name if file == path else str(file.relative_to(path or ""))
            yield FileCount(name), self._file_rows(file)

    def _parse_row(self, row: Any, number: int) -> Row:
        """Parse a raw seed row, and give it the id `name:number`."""
        id = f"{self.name}:{number}"
        if isinstance(row, RejectedRow):
            return replace(row, id=id)
        return read_row(row, id, self._settings)

    def _file_rows(self, path: Path) -> Iterator[Any]:
        """Yield a seed file's raw rows; an unreadable row is a `RejectedRow` without an id.

        A table is recognized by its first bytes or its suffix, any other format by the suffix. The
        default is JSON.
        """
        suffix = plain_suffix(path.name)
        with open_seed_file(path) as file:
            if file.peek(6).startswith(TABLE_MAGIC) or suffix in TABLE_SUFFIXES:
                yield from table_rows(path, self._columns)
            elif suffix == ".csv":
                yield from delimited_rows(file, path, self._columns)
            elif suffix == ".tsv":
                yield from delimited_rows(file, path, self._columns, "\t")
            elif suffix == ".txt":
                yield from text_lines(file)
            else:
                yield from json_rows(file, path)


def _is_seed_file(file: Path, directory: Path) -> bool:
    """Return whether a directory's file is read: not hidden, no description, of a known suffix."""
    is_hidden = any(part.startswith(".") for part in file.relative_to(directory).parts)
    is_description = DESCRIPTIONS.fullmatch(file.name)
    return file.is_file() and not is_hidden and not is_description and plain_suffix(file.name) != ""


def source_readers(settings: SeedsConfig) -> list[SourceReader]:
    """Create a reader for each seed source of a configuration."""
    named = zip(settings.sources, name_sources(settings.sources), strict=True)
    return [SourceReader(source, name) for source, name in named]


def read_questions(path: Path) -> list[Conversation]:
    """Read a file of benchmark questions, in any format of seed files, as conversations.

    Rejected rows are left out. Errors are those of iterating over a `SourceReader`.
    """
    advice = "rename other columns in the file"
    rows = SourceReader(SeedSource(path=path), path.stem, other_columns=advice)
    return [row for row in rows if isinstance(row, Conversation)]
