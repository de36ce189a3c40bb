"""`tree.json`: the tree that calibrate found, how it was searched, and what it promises. Also: files of paths alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.decoding.tree import TreePath
from pipeline.errors import DataError
from pipeline.storage.atomic import write_json

TREE_FILE = "tree.json"
FIX = "Give a JSON list of paths, such as [[0], [0, 0], [1]]."


@dataclass(frozen=True)
class Search:
    searches: dict[str, float]  # each search's acceleration rate on the half of the rows that judges
    sizes: list[dict[str, float]]  # what each size that was timed costs and promises
    judged: tuple[TreePath, ...]  # the tree whose rate is the expected one
    searched: tuple[TreePath, ...]  # the chosen search on all rows, up to the stock tree's size


@dataclass(frozen=True)
class Calibration:
    """A tree over the heads' guesses, and what held-out rows say of it; [K heads, R ranks]."""

    choices: tuple[TreePath, ...]
    probabilities: list[float]  # how often each path was right
    accuracies: list[list[float]]  # [K, R], how often each guess was right
    expected_acceleration_rate: float
    search: Search | None = None  # None of a user's own tree

    def stored(self) -> dict[str, Any]:
        own = {name: value for name, value in asdict(self).items() if name != "search"}
        return (asdict(self.search) if self.search else {}) | own

    def write(self, directory: Path) -> None:
        write_json(directory / TREE_FILE, self.stored())


def read_calibration(directory: Path) -> Calibration:
    """The tree in a calibrate stage's directory.

    Raises:
        DataError: There is none, or it is damaged.
    """
    found, where = _read(directory / TREE_FILE), str(directory / TREE_FILE)
    try:
        search = None
        if "searches" in found:
            judged, searched = _paths(found["judged"], where), _paths(found["searched"], where)
            search = Search(found["searches"], found["sizes"], judged, searched)
        figures = {name: found[name] for name in ("probabilities", "accuracies", "expected_acceleration_rate")}
        return Calibration(_paths(found["choices"], where), **figures, search=search)
    except (KeyError, TypeError) as error:
        fix = "Run the same command again with --fresh calibrate."
        raise DataError(f"This is no tree that calibrate wrote: it has no {error}.", where, fix) from None


def read_paths(path: Path) -> tuple[TreePath, ...]:
    """The paths in a JSON file: a list of them (an export's tree, a user's own), or a tree.json.

    Raises:
        DataError: The file cannot be read, or holds no list of paths.
    """
    found = _read(path)
    return _paths(found.get("choices") if isinstance(found, Mapping) else found, str(path))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"The tree cannot be read: {error}.", str(path), FIX) from None


def _paths(found: Any, where: str) -> tuple[TreePath, ...]:
    if not isinstance(found, list) or not all(isinstance(path, list) for path in found):
        raise DataError("The tree is not a list of paths.", where, FIX)
    return tuple(map(tuple, found))
