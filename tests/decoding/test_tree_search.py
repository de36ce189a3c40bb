"""Searched trees are optimal for their counts, and are rated on unseen text."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.decoding.held_out import replay
from pipeline.decoding.tree_search import (
    CrossFit,
    fastest_choice,
    joint_tree,
    rank_accuracies,
)
from pipeline.heads.accuracy import MISS
from tests.decoding.ranks import held_out, ranks_of


@settings(max_examples=25, deadline=None)
@given(ranks=held_out(num_heads=2, top=2), num_nodes=st.integers(1, 4))
def test_no_tree_of_the_size_is_right_more_often(ranks, num_nodes):
    columns = ranks.ranks_KN.T.tolist()
    paths = [path for depth in (1, 2) for path in itertools.product(range(2), repeat=depth)]
    shares = {}
    for path in paths:
        right = [tuple(column[: len(path)]) == path for column in columns]
        shares[path] = sum(right) / len(columns)
    best = 0.0
    for chosen in itertools.combinations(paths, num_nodes):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            best = max(best, sum(shares[path] for path in chosen))
    choices = joint_tree(ranks, num_nodes)
    assert sum(shares[path] for path in choices) == pytest.approx(best)
    larger = joint_tree(ranks, 99)
    assert choices == larger[: len(choices)], "a smaller tree is the beginning of a larger one"


@settings(max_examples=40, deadline=None)
@given(ranks=held_out(least=2), size=st.integers(1, 9))
def test_each_half_is_replayed_with_the_other_half_s_tree(ranks, size):
    fits = CrossFit(ranks, 9, None)
    choices = fits.whole[:size]
    assert choices == joint_tree(ranks, 9)[:size]
    depth, kept = max(map(len, choices)), []
    for searched_on, judged_on in (ranks.conversation_halves(), ranks.conversation_halves()[::-1]):
        tree = joint_tree(searched_on, 9)[:size]
        kept += replay(judged_on, [path for path in tree if len(path) <= depth]).kept_S.tolist()
    rate = 1 + sum(kept) / len(kept)
    assert fits.replay(size).acceleration_rate == pytest.approx(rate)


@pytest.mark.parametrize(
    ("rate", "dearer", "chosen"),
    [
        (2.0, 0.98, 2),  # two nodes are faster
        (2.0, 1.02, 2),  # as fast, as far as can be measured: the rate decides
        (2.0, 1.07, 1),  # one node is faster
        (1.51, 1.02, 1),  # a hardly higher rate is not worth two percent of speed
        (1.55, 1.02, 2),
    ],
)
def test_among_equally_fast_choices_the_rate_decides(rate, dearer, chosen):
    assert fastest_choice({1: 1.5, 2: rate}, {1: 1.0, 2: rate / 1.5 * dearer}) == chosen


def test_a_choice_with_unknown_overhead_is_the_last():
    nan = float("nan")
    assert fastest_choice({1: 1.5, 2: 1.6}, {1: nan, 2: 1.5}) == 2
    assert fastest_choice({1: 1.5, 2: 1.6}, {1: nan, 2: nan}) in (1, 2)


def test_a_head_that_is_never_right_still_gets_a_tree():
    ranks = ranks_of(np.full((2, 6), MISS, np.uint8), np.array([0, 3]))
    assert joint_tree(ranks, 8) == ((0,),)


def test_rank_accuracies_are_shares_of_single_guesses():
    accuracies = rank_accuracies(np.array([[5, 2, 0], [0, 1, 3]]), np.array([10, 8]))
    assert accuracies == [[0.5, pytest.approx(0.2), 0.0], [0.0, 0.125, 0.375]]
    assert rank_accuracies(np.array([[0, 0]]), np.array([0])) == [[0.0, 0.0]]  # without labels
