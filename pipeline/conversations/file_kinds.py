"""The kinds of seed files, each one object: its suffixes, the bytes that it begins with, and how
its rows are read.

A new kind is one entry of `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from pipeline.conversations import byte_rows, table_rows

MAX_FILE_BYTES = 64 * 10**9


@dataclass(frozen=True)
class Wanted:
    """What is read of a file.

    Attributes:
        named: The columns that `seeds.sources[].columns` names; none reads all.
        known: The keys of rows that some form reads: of a table without named columns no others are
            read.
        most_bytes: The file's limit, unpacked.
    """

    named: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    most_bytes: int = MAX_FILE_BYTES


@dataclass(frozen=True)
class FileKind:
    """One kind of file; `rows` gives a row's value, or `Unreadable`, for each row."""

    suffixes: tuple[str, ...]
    rows: Callable[[Path, Wanted], Iterator[Any]]
    magic: bytes | None = None


def _streamed(
    rows: Callable[[BufferedReader, Path, Wanted], Iterator[Any]],
) -> Callable[[Path, Wanted], Iterator[Any]]:
    def read(path: Path, wanted: Wanted) -> Iterator[Any]:
        with byte_rows.readable(path, wanted.most_bytes) as file:
            yield from rows(file, path, wanted)

    return read


def _delimited(delimiters: str) -> Callable[[Path, Wanted], Iterator[Any]]:
    return _streamed(
        lambda file, path, wanted: table_rows.delimited_rows(file, path, wanted.named, delimiters)
    )


def _table(rows: Callable[..., Iterator[Any]]) -> Callable[[Path, Wanted], Iterator[Any]]:
    return lambda path, wanted: rows(path, wanted.named, wanted.known, wanted.most_bytes)


KINDS = {
    "json": FileKind(
        (".json", ".jsonl", ".ndjson"),
        _streamed(lambda file, path, _: byte_rows.json_rows(file, path)),
    ),
    "text": FileKind((".txt",), _streamed(lambda file, *_: byte_rows.lines(file))),
    "csv": FileKind((".csv",), _delimited(table_rows.DELIMITERS)),
    "tsv": FileKind((".tsv",), _delimited("\t")),
    "parquet": FileKind((".parquet",), _table(table_rows.parquet_rows), b"PAR1"),
    "arrow": FileKind((".arrow", ".feather"), _table(table_rows.arrow_rows), b"ARROW1"),
}
SUFFIXES = tuple(suffix for kind in KINDS.values() for suffix in kind.suffixes)


def plain_suffix(name: str) -> str:
    """A file's suffix in lower case, without `.gz`; empty where no kind has it."""
    name = name.lower().removesuffix(".gz")
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def file_rows(path: Path, wanted: Wanted) -> Iterator[Any]:
    """A file's rows, by the bytes that it begins with, or else its suffix; JSON where neither says
    anything.

    Raises:
        ConfigError: A column that is named is not there.
        DataError: It is damaged or too large.
        EnvironmentFault: It cannot be read now.
    """
    with byte_rows.reading(path), path.open("rb") as file:
        begin = file.read(16)
    suffix = plain_suffix(path.name)
    by_content = (kind for kind in KINDS.values() if kind.magic and begin.startswith(kind.magic))
    by_suffix = (kind for kind in KINDS.values() if suffix in kind.suffixes)
    return next(by_content, next(by_suffix, KINDS["json"])).rows(path, wanted)
