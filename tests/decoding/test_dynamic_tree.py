"""Dynamic trees equal trees that are grown node by node, and keep the target's text."""

from __future__ import annotations

import heapq
import itertools
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.conversations.spans import IGNORED
from pipeline.decoding import dynamic_tree
from pipeline.decoding.dynamic_tree import NEVER, PREFER_PARENT, DynamicTree, check_tree
from pipeline.errors import ConfigError
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape
from tests.heads.test_recurrent import SIZE, VOCAB, random_cell

TREES = [DynamicTree(1, 1, 1), DynamicTree(7, 3, 3), DynamicTree(30, 3, 4)]
ROOTS = torch.tensor([4, 9, 4])


@st.composite
def dynamic_trees(draw) -> DynamicTree:
    max_depth, top = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    num_nodes = draw(st.integers(1, top + (max_depth - 1) * top**2))
    return DynamicTree(num_nodes, max_depth, top)


@torch.no_grad()
def grown_by_hand(tree: DynamicTree, heads, hidden_D, token: int) -> dict[tuple[int, ...], float]:
    """Grow one tree node by node: the tokens on each chosen path, with the path's score.

    Examples with two nodes that are equally probable in fp32 are passed over.
    """
    proposed: dict[tuple[int, ...], float] = {}
    level = [((), 0.0, hidden_D, token)]
    for depth in range(tree.max_depth):
        children = []
        for path, score, hidden, last in level:
            state, logits = heads.expand(hidden[None, None], torch.tensor([[last]]), depth)
            log_p = logits[0, 0].log_softmax(0)
            for guess in log_p.argsort(descending=True)[: tree.top].tolist():
                own = score + max(float(log_p[guess]), -100.0) - PREFER_PARENT
                children.append(((*path, guess), own, state[0, 0], guess))
        proposed |= {path: score for path, score, *_ in children}
        level = heapq.nlargest(tree.top, children, key=lambda child: child[1])
    assume(min(np.diff(sorted(proposed.values())), default=1.0) > 1e-5)
    return dict(heapq.nlargest(tree.num_nodes, proposed.items(), key=lambda node: node[1]))


@given(dynamic_trees(), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_the_most_probable_nodes_are_chosen_and_form_a_tree(tree: DynamicTree, seed: int):
    heads, hidden = random_cell(seed), torch.randn(3, SIZE, dtype=torch.float64)
    grown, tokens_BN = tree.grow(heads, hidden, ROOTS)
    assert torch.equal(tokens_BN[:, 0], ROOTS)
    for text, token in enumerate(ROOTS.tolist()):
        expected = grown_by_hand(tree, heads, hidden[text], token)
        paths = set()
        for row in range(tree.num_nodes + 1):
            depth = int(grown.depth[text, row])
            rows = grown.retrieve_indices[text, row, : depth + 1].tolist()
            assert (rows[0], rows[-1]) == (0, row)
            assert not grown.retrieve_indices[text, row, depth + 1 :].any()
            for above, below in itertools.pairwise(rows):
                assert grown.parent[text, below] == above
            paths.add(tuple(tokens_BN[text, rows[1:]].tolist()))
        assert paths == {(), *expected}


@given(dynamic_trees(), st.integers(0, 99), st.data())
@settings(max_examples=50, deadline=None)
def test_a_place_is_that_of_the_node_among_all_proposed(tree: DynamicTree, seed, data):
    heads, hidden = random_cell(seed), torch.randn(3, SIZE, dtype=torch.float64)
    widest = tree.resized(10**9)
    labels = torch.full((widest.max_depth + 1, 3), IGNORED)
    expected = torch.full((widest.max_depth, 3), NEVER)
    for text, token in enumerate(ROOTS.tolist()):
        scores = grown_by_hand(widest, heads, hidden[text], token)
        ordered = sorted(scores, key=scores.__getitem__, reverse=True)
        assert len(ordered) == widest.num_proposed
        path = data.draw(st.sampled_from(ordered))
        for depth, guess in enumerate(path):
            labels[depth, text] = guess
            expected[depth, text] = ordered.index(path[: depth + 1])
    for chunk_bytes in (1, 1 << 30):
        with patch.object(dynamic_tree, "CHUNK_BYTES", chunk_bytes):
            found = tree.places(heads, hidden, ROOTS, labels)
        assert found.dtype == torch.int16 and found.tolist() == expected.tolist()


def test_nothing_has_a_place_below_a_token_not_proposed():
    """The child of the root has no place one depth below."""
    heads, tree = random_cell(), DynamicTree(1, 2, 2)
    hidden = torch.randn(3, SIZE, dtype=torch.float64)
    children_BC = tree.propose(heads, hidden, ROOTS).tokens_BC[:, : tree.top]
    missing = [min(set(range(VOCAB)) - set(children)) for children in children_BC.tolist()]
    labels = torch.stack((torch.tensor(missing), children_BC[:, 0]))
    assert tree.places(heads, hidden, ROOTS, labels).eq(NEVER).all()


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5])
def test_a_parent_comes_before_an_equally_probable_child(num_nodes):
    """Each guess has probability one in fp32."""
    heads = MedusaHeads(MedusaShape(SIZE, VOCAB, 6))
    heads.lm_head.data[:, 7] = 200.0
    tree, _ = DynamicTree(num_nodes, 6, 3).grow(heads, torch.ones(2, SIZE), torch.tensor([4, 9]))
    assert tree.depth.tolist() == [list(range(num_nodes + 1))] * 2
    assert tree.parent.tolist() == [[0, *range(num_nodes)]] * 2


def test_a_tree_that_cannot_be_filled_is_refused():
    assert check_tree(TREES[1], 3, 3) == TREES[1]
    for depth, top in ((2, 3), (3, 2)):
        with pytest.raises(ConfigError):
            check_tree(TREES[1], depth, top)
    for sizes in ((4, 1, 3), (13, 2, 3), (0, 2, 3)):
        with pytest.raises(ValueError, match="nodes of the"):
            DynamicTree(*sizes)
