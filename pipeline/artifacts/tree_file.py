"""`tree.json`: the tree that calibrate found, how it was searched, and what it promises. Also:
files of paths alone.

With a dynamic tree it holds a static one of the same size as well, for whoever reads paths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.tree import TreePath
from pipeline.errors import DataError
from pipeline.storage.atomic import write_json

TREE_FILE = "tree.json"
Figures = dict[str, Any]

FIGURES = (
    "node_shares", "accuracies", "expected_acceleration_rate", "expected_standard_error", "num_speculative_tokens",  # noqa: E501
    "chain",
)  # fmt: skip
FIX = "Give a JSON list of paths, such as [[0], [0, 0], [1]]."


@dataclass(frozen=True)
class Search:
    searches: dict[
        str, float
    ]  # each search's acceleration rate, its trees judged on text that they have not seen
    sizes: list[Figures]  # what each size that was timed costs and promises
    judged: list[
        tuple[TreePath, ...]
    ]  # the trees of both halves, whose rate on the other half is the expected one
    searched: tuple[TreePath, ...]  # the chosen search on all rows, up to the stock tree's size


@dataclass(frozen=True)
class Calibration:
    """A tree over the heads' guesses and a chain of their first ones, and what held-out rows say of
    both; [K, R].

    `choices` are the static tree's. Where there is a `dynamic` one, that is used, and expected to
    have the rate here.
    """

    choices: tuple[TreePath, ...]
    node_shares: list[
        float
    ]  # of the steps that add each node of `choices`; 1 and their sum are its expected rate
    accuracies: list[list[float]]  # [K, R], how often each guess was right
    expected_acceleration_rate: float
    expected_standard_error: float | None
    num_speculative_tokens: int  # of the chain that an engine such as vLLM drafts
    chain: list[
        Figures
    ]  # of 1, 2, … draft tokens: the expected rate, and the overhead where it was timed
    search: Search | None = None  # None of a user's own tree
    dynamic: DynamicTree | None = None

    @property
    def tree(self) -> tuple[TreePath, ...] | DynamicTree:
        """The tree that native decoding uses."""
        return self.dynamic or self.choices

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
    return _calibration(_read(directory / TREE_FILE), str(directory / TREE_FILE))


def _calibration(found: Any, where: str) -> Calibration:
    try:
        search = None
        if "searches" in found:
            judged = [_paths(tree, where) for tree in found["judged"]]
            search = Search(
                found["searches"], found["sizes"], judged, _paths(found["searched"], where)
            )
        figures = {name: found[name] for name in FIGURES}
        dynamic = DynamicTree(**found["dynamic"]) if found["dynamic"] else None
        return Calibration(
            _paths(found["choices"], where), **figures, search=search, dynamic=dynamic
        )
    except (KeyError, TypeError, ValueError) as error:
        fix = "Run the same command again with --fresh calibrate."
        what = f"This is no tree that calibrate wrote ({type(error).__name__}: {error})."
        raise DataError(what, where, fix) from None


def read_paths(path: Path) -> tuple[TreePath, ...]:
    """The paths in a JSON file: a list of them (an export's tree, a user's own), or a tree.json.

    Raises:
        DataError: The file cannot be read, or holds no list of paths.
    """
    found = _read(path)
    return _paths(found.get("choices") if isinstance(found, Mapping) else found, str(path))


def read_tree(path: Path) -> tuple[TreePath, ...] | DynamicTree:
    """The tree in a JSON file: of a tree.json the one that is used, else as `read_paths`.

    Raises:
        DataError: The file cannot be read, or holds no tree.
    """
    found = _read(path)
    if not isinstance(found, Mapping) or not found.get("dynamic"):
        return read_paths(path)
    return _calibration(found, str(path)).tree


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"The tree cannot be read: {error}.", str(path), FIX) from None


def _paths(found: Any, where: str) -> tuple[TreePath, ...]:
    if not isinstance(found, list) or not all(isinstance(path, list) for path in found):
        raise DataError("The tree is not a list of paths.", where, FIX)
    return tuple(map(tuple, found))
