from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.decoding.tree import Tree, check_choices, expected_acceleration_rate, greedy_tree
from pipeline.errors import ConfigError

quick = settings(deadline=None, max_examples=40)

accuracies = st.integers(1, 3).flatmap(
    lambda num_ranks: st.lists(
        st.lists(st.floats(0, 1), min_size=num_ranks, max_size=num_ranks), min_size=1, max_size=3
    )
)
trees = st.builds(
    lambda accuracy, num_nodes: greedy_tree(accuracy, num_nodes),
    st.lists(st.lists(st.floats(0.01, 1), min_size=4, max_size=4), min_size=1, max_size=4),
    st.integers(1, 30),
)


def is_tree(paths) -> bool:
    return all(path[:-1] == () or path[:-1] in paths for path in paths)


@quick
@given(accuracies, st.integers(1, 12), st.integers(1, 3))
def test_greedy_tree_is_connected_and_within_its_budget_and_depth(accuracy, num_nodes, max_depth):
    choices = greedy_tree(accuracy, num_nodes, max_depth)
    assert len(set(choices)) == len(choices) <= num_nodes
    assert is_tree(set(choices)) and all(
        1 <= len(path) <= min(max_depth, len(accuracy)) for path in choices
    )


@quick
@given(
    st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=2), min_size=2, max_size=3),
    st.integers(1, 4),
)
def test_no_tree_of_the_same_size_is_expected_to_be_faster(accuracy, num_nodes):
    paths = [
        path for depth in range(1, len(accuracy) + 1) for path in product(range(2), repeat=depth)
    ]
    best = max(
        expected_acceleration_rate(accuracy, chosen)
        for chosen in combinations(paths, min(num_nodes, len(paths)))
        if is_tree(set(chosen))
    )
    assert expected_acceleration_rate(accuracy, greedy_tree(accuracy, num_nodes)) == pytest.approx(
        best
    )


def test_greedy_tree_of_a_worked_example():
    # Products: (0) .6, (0,0) .30, (1) .2, (0,1) .06, (1,0) .10, (1,1) .02.
    accuracy = [[0.6, 0.2], [0.5, 0.1]]
    assert greedy_tree(accuracy, 4) == ((0,), (0, 0), (1,), (1, 0))
    assert expected_acceleration_rate(accuracy, greedy_tree(accuracy, 4)) == pytest.approx(
        1 + 0.6 + 0.3 + 0.2 + 0.1
    )


def test_a_better_second_guess_is_taken_before_the_first():
    assert greedy_tree([[0.1, 0.4]], 1) == ((1,),)


def test_guesses_that_were_never_right_are_left_out():
    assert greedy_tree([[0.5, 0.0], [0.0, 0.0]], 10) == ((0,),)


def test_plain_decoding_is_expected_to_give_one_token_per_step():
    assert expected_acceleration_rate([[0.5]], ()) == 1.0


@quick
@given(
    trees.filter(len),
    st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=4, max_size=4),
)
def test_expected_rate_is_the_mean_of_simulated_steps(choices, accuracy):
    """Enumerates which guess each of independent heads gets right; a step keeps the longest path
    that holds.
    """
    accuracy = [
        [each / max(1.0, sum(row)) for each in row] for row in accuracy[: max(map(len, choices))]
    ]
    total = 0.0
    for outcome in product(range(5), repeat=len(accuracy)):  # 4: no guess is right
        chance = 1.0
        for row, right in zip(accuracy, outcome, strict=True):
            chance *= row[right] if right < 4 else max(0.0, 1 - sum(row))
        total += chance * (
            1 + max((len(path) for path in choices if path == outcome[: len(path)]), default=0)
        )
    assert expected_acceleration_rate(accuracy, choices) == pytest.approx(total)


@quick
@given(trees)
def test_checked_choices_come_back_as_they_are(choices):
    assert check_choices([list(path) for path in choices], num_heads=4, top=4) == choices


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        ([], "no nodes"),
        ([[]], "not a path"),
        ([[0], "0"], "not a path"),
        ([[0], [0, 1.0]], "not a path"),
        ([[0], [True]], "not a path"),
        ([0], "not a path"),
        ([[0], [1], [0]], "twice"),
        ([[0], [0, 0], [0, 0, 0]], "deeper"),
        ([[0], [3]], "not made"),
        ([[0], [-1]], "not made"),
        ([[0], [1, 0]], "parent is missing"),
    ],
)
def test_choices_that_are_no_tree_are_refused(choices, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        check_choices(choices, num_heads=2, top=3)


@pytest.mark.parametrize("choices", [((1, 0),), ((0,), (0,))])
def test_tensors_are_only_built_of_trees(choices):
    with pytest.raises(ValueError, match="not a tree"):
        Tree(choices)


@quick
@given(trees)
def test_rows_attend_to_exactly_their_prefixes(choices):
    tree = Tree(choices)
    paths = [(), *tree.choices]
    expected = [[row[: len(other)] == other for other in paths] for row in paths]
    assert tree.ancestors.tolist() == expected


@quick
@given(trees)
def test_tensors_describe_the_paths(choices):
    tree = Tree(choices)
    paths = [(), *tree.choices]
    assert set(tree.choices) == set(choices)
    assert tree.depth.tolist() == [len(path) for path in paths]
    assert [paths[row] for row in tree.parent.tolist()] == [path[:-1] for path in paths]
    for row, path in enumerate(paths):
        rows = tree.retrieve_indices[row, : len(path) + 1].tolist()
        assert [paths[each] for each in rows] == [path[:depth] for depth in range(len(path) + 1)]
        assert not tree.retrieve_indices[row, len(path) + 1 :].any()
        # Sorted: a moved cache entry never overwrites one that is still to be moved.
        assert sorted(rows) == rows
    guesses = torch.arange(tree.max_depth * tree.top).view(tree.max_depth, tree.top)
    assert guesses.flatten()[tree.guess].tolist() == [
        int(guesses[len(path) - 1, path[-1]]) for path in paths[1:]
    ]


def test_the_path_of_best_guesses_lies_in_the_first_rows():
    tree = Tree([(1,), (0, 1), (0,), (0, 0), (0, 0, 0), (0, 1, 0)])
    assert tree.choices[:3] == ((0,), (0, 0), (0, 0, 0))


def test_the_empty_tree_is_a_root_alone():
    tree = Tree(())
    assert (tree.num_nodes, tree.max_depth) == (0, 0)
    assert tree.retrieve_indices.tolist() == [[0]] and tree.ancestors.tolist() == [[True]]


def test_a_tree_may_be_given_as_json_has_it():
    paths = ((0,), (0, 1), (2,))
    lists = [list(path) for path in paths]
    assert Tree(lists).choices == Tree(paths).choices
    assert expected_acceleration_rate([[0.5, 0.2, 0.1], [0.3, 0.2]], lists) == pytest.approx(
        1 + 0.5 + 0.5 * 0.2 + 0.1
    )
