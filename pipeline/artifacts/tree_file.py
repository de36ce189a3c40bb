"""The calibrate stage's `tree.json` and summary, and files of tree paths.

If the tree is dynamic, tree.json also holds the paths of a static tree of the same size.

Letters: K heads, R ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.artifacts.json_form import from_json, result, to_json
from pipeline.artifacts.seen_answers import NewAnswers
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.tree import TreePath
from pipeline.errors import DataError
from pipeline.storage.atomic import write_json

TREE_FILE = "tree.json"
FIX = "Give a JSON list of paths, such as [[0], [0, 0], [1]]."


@result
class Expected:
    """An expected acceleration rate and, if the overhead was timed, an expected speedup."""

    overhead: float | None = None
    expected_acceleration_rate: float | None = None
    expected_standard_error: float | None = None
    expected_speedup: float | None = None


@result
class TimedSize(Expected):
    """The expected speedup of a tree of `nodes` nodes."""

    nodes: int


@result
class ChainLength(Expected):
    """The expected speedup of a chain of first guesses, as vLLM drafts it."""

    draft_tokens: int
    new: NewAnswers


@result
class Calibration:
    """The calibrated tree and chain of first guesses, with their expected rates.

    If `dynamic` is set, native decoding uses the dynamic tree, `expected_acceleration_rate` is its
    rate, and `choices` is a static tree of the same size.
    """

    choices: tuple[TreePath, ...]
    accuracies: list[list[float]]  # [K, R], how often each guess was right
    expected_acceleration_rate: float
    num_speculative_tokens: int  # of the chain
    chain: list[ChainLength]  # of 1, 2, … draft tokens
    dynamic: DynamicTree | None = None

    @property
    def tree(self) -> tuple[TreePath, ...] | DynamicTree:
        """The tree that native decoding uses: the dynamic one if there is one."""
        return self.dynamic or self.choices

    def write(self, directory: Path) -> None:
        """Write tree.json into the calibrate stage's directory."""
        write_json(directory / TREE_FILE, to_json(self))


@result
class Accuracy:
    """A head's accuracies: the shares of its labels that are among its first 1 to 5 guesses."""

    labels: int  # the number of them
    top1: float | None = None
    top2: float | None = None
    top3: float | None = None
    top4: float | None = None
    top5: float | None = None


@result
class TreeFigures(Expected):
    """The section `tree` of report.json."""

    nodes: int
    depth: int
    dynamic: DynamicTree | None = None
    sizes: list[TimedSize] | None = None
    answers: int
    seen_share: float
    new: NewAnswers
    num_speculative_tokens: int
    chain: list[ChainLength]


@result
class CalibrateResult:
    """The summary of the calibrate stage."""

    heads: list[Accuracy]
    tree: TreeFigures
    positions: int
    conversations: int


def read_calibration(directory: Path) -> Calibration:
    """Read tree.json from a calibrate stage's directory.

    Raises:
        DataError: The file is missing or damaged.
    """
    path = directory / TREE_FILE
    return _parse_calibration(_read_tree_json(path), path)


def read_paths(path: Path) -> tuple[TreePath, ...]:
    """Read the paths of a static tree from a tree.json, or from a JSON list of paths.

    Raises:
        DataError: The file cannot be read, or holds no list of paths.
    """
    content = _read_tree_json(path)
    if isinstance(content, dict):
        content = content.get("choices")
    if not isinstance(content, list) or not all(isinstance(each, list) for each in content):
        raise DataError("The tree is not a list of paths.", path, FIX)
    return tuple(tuple(each) for each in content)


def read_tree(path: Path) -> tuple[TreePath, ...] | DynamicTree:
    """Read a tree from a tree.json, or from a JSON list of paths.

    If a tree.json holds a dynamic tree, that tree is returned.

    Raises:
        DataError: The file cannot be read, or holds no tree.
    """
    content = _read_tree_json(path)
    if isinstance(content, dict) and content.get("dynamic"):
        return _parse_calibration(content, path).tree
    return read_paths(path)


def _parse_calibration(content: Any, path: Path) -> Calibration:
    """Convert the content of tree.json to a `Calibration`; raise DataError if it is invalid."""
    try:
        return from_json(Calibration, content)
    except ValidationError as error:
        raise DataError(
            f"This is not a tree that calibrate wrote ({error.errors()[0]['msg']}).",
            path,
            "Run the same command again with --fresh calibrate.",
        ) from None


def _read_tree_json(path: Path) -> Any:
    """Read a JSON file; raise DataError if it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"The tree cannot be read: {error}.", path, FIX) from None
