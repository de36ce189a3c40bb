from __future__ import annotations

import hashlib
import json
from collections import Counter
from itertools import combinations, product
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.outcome import StockTree
from pipeline.decoding.tree import (
    CHILDREN,
    STOCK_NODES,
    Tree,
    check_choices,
    expected_acceleration_rate,
    greedy_tree,
    stock_tree,
)
from pipeline.errors import ConfigError
from tests.decoding.steps import random_trees

# From medusa/model/medusa_choices.py of FasterDecoding/Medusa: nodes by depth, hash of the sorted
# lists as JSON.
PUBLISHED = {
    "mc-sim-7b-63": ([10, 28, 23, 2], "24a7a53296158e5e"),
    "vicuna-7b-stage2": ([10, 23, 23, 7], "a070fef671c75878"),
    "vicuna-7b-stage1-ablation": ([10, 21, 25, 7], "ece306e9c6e1b57a"),
    "vicuna-7b-stage1": ([10, 32, 20, 1], "76d50f3261ba37e2"),
    "vicuna-13b-stage2": ([10, 19, 25, 9], "a7f5fd7cadc13923"),
    "vicuna-13b-stage1": ([10, 29, 23, 1], "4ed22d5c76df18d6"),
    "vicuna-33b-stage2": ([10, 24, 24, 5], "dd5569233e5ca72c"),
    "vicuna-33b-stage1": ([10, 34, 19], "0cbcee50ac32df8b"),
    "zephyr-stage2": ([10, 27, 23, 3], "18347276e21250dd"),
}
quick = settings(deadline=None, max_examples=40)


def accuracies(num_ranks: int, least: int = 1, most: int = 3):
    ranks = st.lists(st.floats(0, 1), min_size=num_ranks, max_size=num_ranks)
    return st.lists(ranks, min_size=least, max_size=most)


def is_tree(paths) -> bool:
    return all(path[:-1] == () or path[:-1] in paths for path in paths)


@quick
@given(accuracies(2), st.integers(1, 4), st.integers(1, 3))
def test_no_tree_within_the_limits_is_expected_to_be_faster(accuracy, num_nodes, max_depth):
    deepest = min(max_depth, len(accuracy))
    paths = [path for depth in range(1, deepest + 1) for path in product(range(2), repeat=depth)]
    rates = []
    for chosen in combinations(paths, min(num_nodes, len(paths))):
        if is_tree(chosen):
            rates.append(expected_acceleration_rate(accuracy, chosen))
    found = greedy_tree(accuracy, num_nodes, max_depth)
    assert is_tree(found) and len(set(found)) == len(found) <= num_nodes
    assert max(map(len, found), default=0) <= deepest
    assert expected_acceleration_rate(accuracy, found) == pytest.approx(max(rates))


def test_guesses_that_are_never_right_are_left_out():
    assert greedy_tree([[0.5, 0.0], [0.0, 0.0]], 10) == ((0,),)


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


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_stock_tree_is_the_published_one(name):
    nodes_by_depth, digest = PUBLISHED[name]
    tree = stock_tree(9, name)
    assert len(tree) == len(check_choices(tree, 4, 10)) == STOCK_NODES
    assert list(Counter(map(len, tree)).values()) == nodes_by_depth
    text = json.dumps(sorted(tree), separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest
    assert set(stock_tree(2, name)) == {path for path in tree if len(path) <= 2}


def test_the_configuration_knows_the_stock_trees():
    assert set(get_args(StockTree)) == CHILDREN.keys() == PUBLISHED.keys()
