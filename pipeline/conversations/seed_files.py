"""The files of a source: which of them are read, and which are not, each with the reason."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import SeedSource
from pipeline.conversations.file_kinds import SUFFIXES, plain_suffix
from pipeline.errors import ConfigError, DataError

# Files that describe a folder, and that a suffix alone would make prompts of.
DESCRIPTIONS = re.compile(
    r"(readme|licen[cs]e|notice|copying|authors|changelog|citation|contributing|credits|requirements|robots)"
    r"([._-].*)?\.txt(\.gz)?",
    re.IGNORECASE,
)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class SkippedFile:
    """A file or folder that is not read; `name` is its path in the source."""

    name: str
    why: str


@dataclass(frozen=True)
class Survey:
    """What lies in a source; the files are sorted by their paths in it."""

    files: list[Path]
    skipped: list[SkippedFile]


def name_sources(sources: Sequence[SeedSource]) -> list[str]:
    """A short unique name for each source, safe in ids and file names: the file's or data set's,
    with `-2` if taken.
    """
    names: list[str] = []
    for source in sources:
        if source.hub:
            last = source.hub.rstrip("/").rpartition("/")[2]
        else:
            last = Path(source.path or "").resolve().name
            if suffix := plain_suffix(last):
                last = re.sub(rf"{re.escape(suffix)}(\.gz)?$", "", last, flags=re.IGNORECASE)
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.") or "source"
        candidates = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        names.append(next(name for name in candidates if name not in names))
    return names


def survey(path: Path, finding: Callable[[Path], str | None]) -> Survey:
    """The files of a source: the path itself, or what is below it, linked folders included.

    Args:
        finding: Of a directory's file with a known suffix: why it holds no conversations, or None
            where it does.

    Raises:
        ConfigError: There is nothing at the path.
        DataError: It is a directory without seed files.
    """
    if path.is_file():
        return Survey([path], [])
    if not path.is_dir():
        raise ConfigError("There is no such seed file or directory.", str(path), _advice(path))
    found = sorted(_walk(path, "", {}), key=lambda entry: entry[0])
    reasons = [(name, why or finding(path / name)) for name, why in found]
    skipped = [SkippedFile(name, why) for name, why in reasons if why]
    files = [path / name for name, why in reasons if not why]
    if not files:
        first = f"; skipped were {_first(skipped)}" if skipped else ", and nothing else"
        what = (
            f"The directory holds no seed files: found none of {', '.join(SUFFIXES)} with"
            f" conversations{first}."
        )
        raise DataError(
            what, str(path), "Name the files themselves, or another directory, in seeds.sources."
        )
    return Survey(files, skipped)


def _advice(path: Path) -> str:
    """What to do about a path that does not exist; an id of the Hub has been made a path by whoever
    read it.
    """
    name = "/".join(path.parts[-2:])
    if HUB_ID.fullmatch(name) and not plain_suffix(name) and not path.parent.exists():
        return (
            'Correct the path in seeds.sources; a data set of the Hub is "seeds.sources=[{hub:'
            f' {name}}}]".'
        )
    return "Correct the path in seeds.sources."


def _first(skipped: Sequence[SkippedFile], number: int = 5) -> str:
    more = f" and {len(skipped) - number} more" if len(skipped) > number else ""
    return ", ".join(f"{file.name} ({file.why.rstrip('.')})" for file in skipped[:number]) + more


def _walk(root: Path, below: str, seen: dict[str, str]) -> Iterator[tuple[str, str | None]]:
    """Each file, by its path in the source, and why it cannot be seeds, by its name alone.

    Args:
        seen: The folders' real paths, each with the name that it was entered by, so that links
            cannot go in circles.
    """
    real = os.path.realpath(root / below)
    if real in seen:
        yield below, f"it links to {seen[real]}, which is read already"
        return
    seen[real] = below or "the directory itself"
    for entry in sorted(
        os.scandir(root / below), key=lambda entry: (entry.is_symlink(), entry.name)
    ):
        name = f"{below}/{entry.name}" if below else entry.name
        if entry.name.startswith("."):
            yield name, "it is hidden"
        elif entry.is_dir():
            yield from _walk(root, name, seen)
        elif not entry.is_file():
            yield name, "it links to nothing" if entry.is_symlink() else "it is no file"
        elif not plain_suffix(name):
            yield name, "no kind of seed files has its suffix"
        elif entry.stat().st_size == 0:
            yield name, "it is empty"
        elif DESCRIPTIONS.fullmatch(entry.name):
            yield name, "by its name it describes the folder; name it in seeds.sources to read it"
        else:
            yield name, None
