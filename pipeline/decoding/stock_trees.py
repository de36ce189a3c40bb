"""The trees of the Medusa authors' code by name (medusa/model/medusa_choices.py), searched for
models of theirs.

A tree is its numbers of children by level: those of the root, then those of each path of depth 1 in
order, and so on; paths after the last number have none. Children are ranks 0, 1, 2, …
"""

from __future__ import annotations

from pipeline.decoding.tree import TreePath

STOCK_TREE = "mc-sim-7b-63"  # searched for Vicuna-7B; the authors' default
STOCK_NODES = 63  # of each, without the root

CHILDREN: dict[str, tuple[str, ...]] = {
    "mc-sim-7b-63": ("10", "10 7 3 2 1 1 1 1 1 1", "10 3 2 1 1 1 1 1 0 0 2 0 0 0 0 0 0 1", "2"),
    "vicuna-7b-stage1": ("10", "10 7 4 3 2 2 1 1 1 1", "9 3 2 1 1 1 0 0 0 0 2 0 0 0 0 0 0 1", "1"),
    "vicuna-7b-stage1-ablation": (
        "10",
        "10 4 2 2 1 1 1",
        "10 4 2 1 1 1 0 0 0 0 3 1 0 0 1 0 1",
        "4 1 1 0 0 0 0 0 0 0 1",
    ),
    "vicuna-7b-stage2": (
        "10",
        "10 5 2 2 1 1 1 1",
        "9 4 2 1 1 1 0 0 0 0 3 1 0 0 0 1",
        "4 1 1 0 0 0 0 0 0 1",
    ),
    "vicuna-13b-stage1": ("10", "10 7 4 2 2 1 1 1 1", "10 4 2 1 1 1 0 0 0 0 2 1 0 0 0 0 0 1", "1"),
    "vicuna-13b-stage2": (
        "10",
        "10 4 2 1 1 1",
        "10 4 2 1 1 1 0 0 0 0 3 1 0 0 1 0 1",
        "4 2 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0 1",
    ),
    "vicuna-33b-stage1": ("10", "10 8 5 3 2 2 1 1 1 1", "9 3 2 1 1 0 0 0 0 0 2 0 0 0 0 0 0 0 1"),
    "vicuna-33b-stage2": (
        "10",
        "10 5 3 2 1 1 1 1",
        "10 4 2 1 1 1 0 0 0 0 3 1 0 0 0 1",
        "3 1 0 0 0 0 0 0 0 0 1",
    ),
    "zephyr-stage2": ("10", "10 6 4 2 2 1 1 1", "10 4 2 1 1 1 0 0 0 0 2 1 0 0 0 0 1", "2 1"),
}


def stock_tree(max_depth: int, name: str = STOCK_TREE) -> tuple[TreePath, ...]:
    """The tree of this name, level by level, cut at `max_depth`; KeyError for a name that is not in
    `CHILDREN`.
    """
    level: list[TreePath] = [()]
    paths: list[TreePath] = []
    for numbers in CHILDREN[name][:max_depth]:
        counts = map(int, numbers.split())
        level = [
            (*path, rank)
            for path, count in zip(level, counts, strict=False)
            for rank in range(count)
        ]
        paths += level
    return tuple(paths)
