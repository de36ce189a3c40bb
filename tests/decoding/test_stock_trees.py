"""The authors' trees are theirs, node for node."""

from __future__ import annotations

import hashlib
import json
from typing import get_args

import pytest

from pipeline.config.outcome import StockTree
from pipeline.decoding.tree import CHILDREN, STOCK_NODES, check_choices, stock_tree

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


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_named_tree_is_the_published_one(name):
    nodes_by_depth, digest = PUBLISHED[name]
    tree = stock_tree(len(nodes_by_depth), name)
    assert len(tree) == len(check_choices(tree, 4, 10)) == STOCK_NODES
    assert [
        sum(len(path) == depth for path in tree) for depth in range(1, len(nodes_by_depth) + 1)
    ] == nodes_by_depth
    text = json.dumps(sorted(tree), separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_the_configuration_knows_the_same_names():
    assert set(get_args(StockTree)) == CHILDREN.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_tree_for_fewer_heads_is_cut_where_they_end(name):
    assert set(stock_tree(2, name)) == {path for path in stock_tree(9, name) if len(path) <= 2}
