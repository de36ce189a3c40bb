"""Read seed conversations: files, directories, and data sets on the Hub.

Promises: every row is returned exactly once, as a conversation or as a rejected row with its
reason, with the id `source:row`; files are streamed, in time linear in their size. A file that is
named and holds no conversation is one error that says what was found; in a directory it is skipped,
and named with the reason.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import SeedsConfig, SeedSource
from pipeline.conversations.byte_rows import Unreadable
from pipeline.conversations.conversation import Conversation, Reason, RejectedRow
from pipeline.conversations.file_kinds import MAX_FILE_BYTES, Wanted, file_rows, plain_suffix
from pipeline.conversations.formats import EXPECTED, KNOWN_KEYS, RowSettings, read_row
from pipeline.conversations.repair import ToolPolicy
from pipeline.conversations.seed_files import SkippedFile, Survey, name_sources, survey
from pipeline.conversations.table_rows import require_columns
from pipeline.errors import ConfigError, DataError, EnvironmentFault

PROBED_ROWS = 1000  # of a directory's file, to tell whether it holds conversations
NOT_CONVERSATIONS = {
    Reason.UNKNOWN_FORMAT,
    Reason.NOT_TEXT,
    Reason.BROKEN_JSON,
    Reason.BROKEN_ROW,
    Reason.UNDECODABLE,
}


@dataclass
class FileCount:
    """How many rows were read of a file or data set, and how many of them are conversations."""

    name: str
    rows: int = 0
    conversations: int = 0


@dataclass
class SourceReader:
    """The rows of one source; `read` and `skipped` say what was read of it, once it has been
    iterated over.

    Args:
        name: The source's own, with which ids begin.
        max_characters: Longer conversations are rejected.
        max_file_bytes: Larger files, unpacked, are an error.
        tools: What becomes of calls of functions, `seeds.tools`.
    """

    source: SeedSource
    name: str
    max_characters: int
    max_file_bytes: int = MAX_FILE_BYTES
    tools: ToolPolicy = "context"
    read: list[FileCount] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)

    def survey(self) -> Survey:
        """The source's files, and what is skipped of it; nothing of a data set of the Hub.

        Raises:
            ConfigError: The source does not exist.
            DataError: It is a directory without seed files.
        """
        if self.source.path is None:
            return Survey([], [])
        return survey(self.source.path, self._finding)

    def __iter__(self) -> Iterator[Conversation | RejectedRow]:
        """Each row, under the id `name:row`, rows counted over all files.

        Raises:
            ConfigError: The source does not exist, or has not the columns that are named.
            DataError: The file, or the data set, holds no conversation data; a file is damaged or
                too large.
            EnvironmentFault: It cannot be read now.
        """
        number, limit = 0, self.source.limit
        for where, name, rows in self._streams():
            count, recognised, first_rejected = FileCount(name), False, None
            self.read.append(count)
            for row in itertools.islice(rows, None if limit is None else limit - number):
                outcome = self._outcome(row, number)
                if isinstance(outcome, RejectedRow):
                    first_rejected = first_rejected or outcome
                recognised |= _is_conversation(outcome)
                count.rows += 1
                count.conversations += isinstance(outcome, Conversation)
                number += 1
                yield outcome
            if not recognised:
                found = (
                    f"The first row: {first_rejected.detail}" if first_rejected else "It is empty."
                )
                if plain_suffix(where) in (".csv", ".tsv"):
                    found += " The first line was taken for the names of the columns."
                raise DataError(
                    f"There is no conversation data in it. {found}", where, f"Expected {EXPECTED}."
                )
            if number == limit:
                return

    def _streams(self) -> Iterator[tuple[str, str, Iterator[Any]]]:
        """The source's files, or its data set: where each is, its name in the source, and its
        rows.
        """
        if self.source.hub is not None:
            yield (
                self.source.hub,
                self.source.hub,
                _hub_rows(self.source.hub, self.source.split, self._wanted.named),
            )
        elif (path := self.source.path) is not None:
            found = self.survey()
            self.skipped = found.skipped
            for file in found.files:
                name = file.name if file == path else file.relative_to(path).as_posix()
                yield str(file), name, file_rows(file, self._wanted)

    @property
    def _wanted(self) -> Wanted:
        columns = tuple((self.source.columns or {}).values())
        return Wanted(columns, KNOWN_KEYS, self.max_file_bytes)

    def _outcome(self, row: Any, number: int) -> Conversation | RejectedRow:
        id = f"{self.name}:{number}"
        if isinstance(row, Unreadable):
            return RejectedRow.of(id, row.rejected, row.text)
        return read_row(row, id, self._row_settings)

    @functools.cached_property
    def _row_settings(self) -> RowSettings:
        columns = {str(key): column for key, column in (self.source.columns or {}).items()}
        return RowSettings(self.source.format, self.max_characters, self.tools, columns)

    def _finding(self, file: Path) -> str | None:
        """Why a file holds no conversations, or None where one of its first rows is one."""
        first = None
        try:
            for number, row in enumerate(
                itertools.islice(file_rows(file, self._wanted), PROBED_ROWS)
            ):
                outcome = self._outcome(row, number)
                if _is_conversation(outcome):
                    return None
                first = first or (outcome.detail if isinstance(outcome, RejectedRow) else None)
        except ConfigError as error:  # of a table without the columns that are named
            return error.what
        return f"it holds no conversation; the first row: {first[:200]}" if first else "it is empty"


def source_readers(settings: SeedsConfig) -> list[SourceReader]:
    """One reader for each source of a configuration."""
    named = zip(settings.sources, name_sources(settings.sources), strict=True)
    limits = settings.max_characters, round(settings.max_file_gb * 10**9), settings.tools
    return [SourceReader(source, name, *limits) for source, name in named]


def read_questions(path: Path) -> list[Conversation]:
    """The questions of a file (MT-Bench, Spec-Bench, any format of seeds); rejected rows are left
    out.
    """
    rows = SourceReader(SeedSource(path=path), path.stem, max_characters=10**9)
    return [row for row in rows if isinstance(row, Conversation)]


def _is_conversation(outcome: Conversation | RejectedRow) -> bool:
    """Whether a row is one, be it of use or not."""
    return isinstance(outcome, Conversation) or outcome.reason not in NOT_CONVERSATIONS


def _hub_rows(hub: str, split: str, named: Sequence[str]) -> Iterator[Any]:
    """The rows of a data set on the Hub, streamed."""
    try:
        import datasets
    except ImportError as error:
        raise EnvironmentFault(
            "The package `datasets` is not installed.", hub, "pip install datasets"
        ) from error
    try:
        found = datasets.load_dataset(hub, split=split, streaming=True)
        if (names := found.column_names) is not None:
            require_columns(named, names, f"{hub}, split {split}")
            wanted = [name for name in names if name in (named or KNOWN_KEYS)]
            found = (
                found.select_columns(wanted) if wanted else found
            )  # images and the like are not decoded
        yield from found
    except ConfigError:
        raise
    except (datasets.exceptions.DatasetNotFoundError, ValueError) as error:
        what = f"The Hub has no such data set or split: {_first_line(error)}"
        raise ConfigError(what, f"{hub}, split {split}", "Correct seeds.sources.") from error
    except (
        Exception
    ) as error:  # whatever the network, the file system or a damaged file raises below `datasets`
        what = f"The data set cannot be read now: {_first_line(error)}"
        fix = "Check the network, or download it and name its files in seeds.sources."
        raise EnvironmentFault(what, f"{hub}, split {split}", fix) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
