"""Trees searched on ranks: optimal for their counts, and judged on text that they have not seen."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.decoding.held_out import HeldOutRanks, walk
from pipeline.decoding.tree import greedy_tree
from pipeline.decoding.tree_search import (
    CrossFit,
    fastest,
    joint_tree,
    rank_accuracies,
    search_trees,
)
from pipeline.heads.accuracy import MISS
from tests.decoding.ranks import held_out, of


def trees(num_heads: int, top: int, num_nodes: int):
    """Every tree of `num_nodes` nodes."""
    paths = [
        p for depth in range(1, num_heads + 1) for p in itertools.product(range(top), repeat=depth)
    ]
    for chosen in itertools.combinations(paths, num_nodes):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            yield chosen


def path_frequencies(ranks: HeldOutRanks, choices) -> list[float]:
    """The share of all positions at which each path is right."""
    columns = [tuple(column) for column in ranks.ranks_KN.T.tolist()]
    return [
        sum(column[: len(path)] == path for column in columns) / len(columns) for path in choices
    ]


@settings(max_examples=25, deadline=None)
@given(ranks=held_out(num_heads=2, top=2), num_nodes=st.integers(1, 4))
def test_no_tree_of_the_size_is_right_more_often_than_the_joint_one(ranks, num_nodes):
    choices, frequencies = joint_tree(ranks, num_nodes)
    best = max(sum(path_frequencies(ranks, tree)) for tree in trees(2, 2, num_nodes))
    assert sum(frequencies) == pytest.approx(best) and frequencies == pytest.approx(
        path_frequencies(ranks, choices)
    )
    assert choices == joint_tree(ranks, 99)[0][: len(choices)], (
        "a smaller tree is the beginning of a larger one"
    )


def test_heads_that_err_together_get_a_deeper_tree_than_the_product_of_their_accuracies_gives():
    ranks_KN = np.array(
        [[0, 0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1, 1, 1, MISS, MISS]], np.uint8
    )
    ranks = of(ranks_KN, np.array([0]))
    assert set(joint_tree(ranks, 4)[0]) == {(0,), (0, 0), (1,), (1, 1)}
    hits_KR, counts_K = ranks.hits(3)
    assert set(greedy_tree(rank_accuracies(hits_KR, counts_K), 4)) == {(0,), (1,), (2,), (0, 0)}


@settings(max_examples=40, deadline=None)
@given(
    ranks=held_out(least=2), size=st.integers(1, 9), search=st.sampled_from(["product", "joint"])
)
def test_each_half_is_judged_by_the_other_half_s_tree_and_what_nodes_add_sums_to_the_estimate(
    ranks, size, search
):
    fits = CrossFit(ranks, 9, None, 3)
    choices = fits.whole[search][:size]
    assert choices == search_trees(ranks, 9, None, 3)[search][:size], (
        "what is used is searched on everything"
    )
    depth, kept = max(map(len, choices)), []
    for searched_on, judged_on in (ranks.halves(), ranks.halves()[::-1]):
        tree = search_trees(searched_on, 9, None, 3)[search][:size]
        kept += walk(judged_on, [path for path in tree if len(path) <= depth]).kept_S.tolist()
    rate = 1 + sum(kept) / len(kept)
    assert fits.walk(search, size).acceleration_rate == pytest.approx(rate)
    assert fits.estimate(search, size).rate == pytest.approx(rate)
    shares = fits.node_shares(search, size)
    assert len(shares) == len(choices) and 1 + sum(shares) == pytest.approx(rate)
    assert all(0 <= share <= 1 + 1e-9 for share in shares)


def test_the_fastest_choice_has_the_highest_speedup():
    rates = {size: 1 + 0.3 * size**0.5 for size in (1, 2, 3, 5, 8, 13, 21, 32)}
    for overheads in (
        {size: 1.0 for size in rates},
        {size: 1 + size / 9 for size in rates},
        {n: 2.0 * n for n in rates},
    ):
        speedups = {size: rates[size] / overheads[size] for size in rates}
        chosen = fastest(rates, overheads)
        assert speedups[chosen] >= 0.95 * max(speedups.values())
    assert chosen == 1, "each node costs more than it can give"


@pytest.mark.parametrize(
    ("dearer", "chosen"),
    [
        (0.98, 2),  # two nodes are faster
        (1.02, 2),  # as fast, as far as can be measured: the rate decides
        (1.07, 1),  # one node is faster
    ],
)
def test_among_choices_that_are_as_fast_the_rate_decides(dearer, chosen):
    assert fastest({1: 1.5, 2: 2.0}, {1: 1.0, 2: 2.0 / 1.5 * dearer}) == chosen


@pytest.mark.parametrize(("rate", "chosen"), [(1.5, 1), (1.51, 1), (1.55, 2)])
def test_a_rate_that_is_hardly_higher_is_not_worth_two_percent_of_speed(rate, chosen):
    """Though timing could not tell the two apart."""
    assert fastest({2: rate, 1: 1.5}, {1: 1.0, 2: 1.02 * rate / 1.5}) == chosen


def test_a_choice_whose_overhead_is_unknown_is_not_made_and_where_none_is_known_one_is():
    assert fastest({1: 1.5, 2: 1.6}, {1: float("nan"), 2: 1.5}) == 2
    assert fastest({1: 1.5, 2: 1.6}, {1: float("nan"), 2: float("nan")}) in (1, 2)


def test_a_head_that_is_never_right_still_gets_a_tree():
    ranks = of(np.full((2, 6), MISS, np.uint8), np.array([0, 3]))
    assert search_trees(ranks, 8, None, 5) == {"product": ((0,),), "joint": ((0,),)}


def test_rank_accuracies_are_shares_of_single_guesses():
    accuracies = rank_accuracies(np.array([[5, 2, 0], [0, 1, 3]]), np.array([10, 8]))
    assert accuracies == [[0.5, pytest.approx(0.2), 0.0], [0.0, 0.125, 0.375]]
    assert rank_accuracies(np.array([[0, 0]]), np.array([0])) == [[0.0, 0.0]], (
        "a head without labels"
    )
