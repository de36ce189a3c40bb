from __future__ import annotations

import hashlib
import json
from collections import Counter

import pytest
from hypothesis import given, settings

from pipeline.decoding.tree import (
    Tree,
    check_choices,
    stock_tree,
)
from pipeline.errors import ConfigError
from tests.decoding.steps import random_trees

quick = settings(deadline=None, max_examples=40)


@pytest.mark.parametrize(
    "choices",
    [
        [],
        [[]],
        [0],
        [[0], [0, 1.0]],
        [[0], [1], [0]],
        [[0], [0, 0], [0, 0, 0]],  # deeper than the heads
        [[0], [3]],  # not guessed
        [[0], [-1]],
        [[0], [1, 0]],  # without its parent
    ],
)
def test_choices_that_are_no_tree_are_refused(choices):
    with pytest.raises(ConfigError):
        check_choices(choices, num_heads=2, top=3)


@quick
@given(random_trees())
def test_tensors_describe_the_paths(choices):
    tree = Tree([list(path) for path in choices])
    paths = [(), *tree.choices]
    by_depth = sorted(choices, key=lambda path: (len(path), path))
    assert tree.choices == Tree(choices).choices == tuple(by_depth)
    assert tree.depth.tolist() == [len(path) for path in paths]
    assert [paths[row] for row in tree.parent.tolist()] == [path[:-1] for path in paths]
    above = [[row[: len(other)] == other for other in paths] for row in paths]
    assert tree.ancestors.tolist() == above
    for row, path in enumerate(paths):
        rows = tree.retrieve_indices[row, : len(path) + 1].tolist()
        assert [paths[each] for each in rows] == [path[:depth] for depth in range(len(path) + 1)]
        assert not tree.retrieve_indices[row, len(path) + 1 :].any()
        # Sorted: a moved cache entry never overwrites one that is still to be moved.
        assert sorted(rows) == rows
    expected = [(len(path) - 1) * tree.top + path[-1] for path in paths[1:]]
    assert tree.guess.tolist() == expected


def test_the_stock_tree_is_the_published_one():
    """From medusa/model/medusa_choices.py: nodes by depth, hash of the sorted list as JSON."""
    tree = stock_tree(9)
    assert list(Counter(map(len, tree)).values()) == [10, 28, 23, 2] and len(tree) == 63
    text = json.dumps(sorted(tree), separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "24a7a53296158e5e"
    assert set(stock_tree(2)) == {path for path in tree if len(path) <= 2}
