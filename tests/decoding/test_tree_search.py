"""Trees searched on ranks: optimal for their counts, and evaluated by the walk of decoding itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.conversations.spans import IGNORED
from pipeline.decoding.decoder import Decoder, acceleration_rate
from pipeline.decoding.tree import greedy_tree
from pipeline.decoding.tree_search import (
    HeldOutRanks,
    accepted_lengths,
    choose_tree,
    interpolated_overhead,
    joint_tree,
    path_frequencies,
    rank_accuracies,
    search_trees,
    simulated_acceleration_rate,
)
from pipeline.heads.accuracy import MISS, NO_LABEL, label_ranks


@st.composite
def held_out(draw, num_heads: int = 3, top: int = 3) -> HeldOutRanks:
    """Spans of 1 to 9 positions; a head has no label where its token would lie beyond the span."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    columns = []
    for length in lengths:
        for place in range(length):
            ranks = draw(st.lists(st.sampled_from([*range(top), MISS]), min_size=num_heads, max_size=num_heads))
            columns.append([rank if place + head < length else NO_LABEL for head, rank in enumerate(ranks)])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    conversations = np.sort(draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths))))
    return HeldOutRanks(np.array(columns, np.uint8).T, starts, conversations)


def of(ranks_KN: np.ndarray, starts: np.ndarray) -> HeldOutRanks:
    """Spans that are a conversation each."""
    return HeldOutRanks(ranks_KN, starts, np.arange(len(starts)))


def trees(num_heads: int, top: int, num_nodes: int):
    """Every tree of `num_nodes` nodes."""
    paths = [p for depth in range(1, num_heads + 1) for p in itertools.product(range(top), repeat=depth)]
    for chosen in itertools.combinations(paths, num_nodes):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            yield chosen


@settings(max_examples=25, deadline=None)
@given(ranks=held_out(num_heads=2, top=2), num_nodes=st.integers(1, 4))
def test_no_tree_of_the_size_is_right_more_often_than_the_joint_one(ranks, num_nodes):
    choices, frequencies = joint_tree(ranks, num_nodes)
    best = max(sum(path_frequencies(ranks, tree)) for tree in trees(2, 2, num_nodes))
    assert sum(frequencies) == pytest.approx(best) and frequencies == pytest.approx(path_frequencies(ranks, choices))
    assert choices == joint_tree(ranks, 99)[0][: len(choices)], "a smaller tree is the beginning of a larger one"


def test_heads_that_err_together_get_a_deeper_tree_than_the_product_of_their_accuracies_gives():
    ranks_KN = np.array([[0, 0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1, 1, 1, MISS, MISS]], np.uint8)
    ranks = of(ranks_KN, np.array([0]))
    assert set(joint_tree(ranks, 4)[0]) == {(0,), (0, 0), (1,), (1, 1)}
    hits_KR, counts_K = ranks.hits(3)
    assert set(greedy_tree(rank_accuracies(hits_KR, counts_K), 4)) == {(0,), (1,), (2,), (0, 0)}


@settings(max_examples=60, deadline=None)
@given(ranks=held_out(), num_nodes=st.integers(1, 12), data=st.data())
def test_accepted_lengths_are_those_of_the_longest_right_path(ranks, num_nodes, data):
    choices, _ = joint_tree(ranks, num_nodes)
    place = data.draw(st.integers(0, len(ranks) - 1))
    truth = tuple(ranks.ranks_KN[:, place].tolist())
    longest = max((len(path) for path in choices if truth[: len(path)] == path), default=0)
    assert accepted_lengths(ranks, choices)[place] == longest


@settings(max_examples=60, deadline=None)
@given(ranks=held_out(), num_nodes=st.integers(0, 12))
def test_the_walk_keeps_every_token_once_and_takes_decoding_s_steps(ranks, num_nodes):
    choices, _ = joint_tree(ranks, num_nodes)
    kept = []
    for start, stop in itertools.pairwise([*ranks.starts.tolist(), len(ranks)]):
        while start < stop:  # the state at `start` is the root's
            guessed = next(
                depth
                for depth in range(3, -1, -1)
                if depth == 0 or tuple(ranks.ranks_KN[:depth, start].tolist()) in choices
            )
            kept.append(min(guessed + 1, stop - start))
            start += guessed + 1
    assert sum(kept) == len(ranks)
    assert simulated_acceleration_rate(ranks, choices) == pytest.approx(sum(kept) / len(kept))


def test_without_a_tree_the_rate_is_one_and_without_text_there_is_none():
    ranks = of(np.zeros((2, 5), np.uint8), np.array([0, 3]))
    assert simulated_acceleration_rate(ranks, ()) == 1.0
    nothing = of(np.zeros((2, 0), np.uint8), np.empty(0, np.int64))
    assert np.isnan(simulated_acceleration_rate(nothing, ((0,),)))


@settings(max_examples=40, deadline=None)
@given(ranks=held_out())
def test_halves_share_the_conversations_out(ranks):
    one, other = ranks.halves()
    spans = [part.tolist() for part in np.split(ranks.ranks_KN, ranks.starts[1:], axis=1)]
    numbers = list(dict.fromkeys(ranks.conversations.tolist()))
    for odd, half in enumerate((one, other)):
        found = [part.tolist() for part in np.split(half.ranks_KN, half.starts[1:], axis=1)] if len(half) else []
        owners = ranks.conversations.tolist()
        assert found == [span for span, of in zip(spans, owners, strict=True) if numbers.index(of) % 2 == odd]
        assert len(half.conversations) == len(half.starts)


def test_overheads_are_read_between_the_sizes_that_were_measured():
    measured = {1: 1.0, 4: 1.3, 16: 2.5}
    assert [interpolated_overhead(measured, size) for size in (1, 2, 4, 10, 16, 99)] == pytest.approx(
        [1.0, 1.1, 1.3, 1.9, 2.5, 2.5]
    )


def test_the_size_is_the_one_with_the_highest_speedup_and_without_overheads_the_highest_rate():
    rng = np.random.default_rng(0)
    ranks = of(rng.choice([0, 0, 0, 1, 2, MISS], (3, 600)).astype(np.uint8), np.arange(0, 600, 30))
    trees, sizes = search_trees(ranks, 32, None, 5), (1, 2, 3, 5, 8, 13, 21, 32)
    for overheads in ({}, {1: 1.0, 32: 1.0}, {1: 1.0, 4: 1.1, 8: 3.0, 32: 9.0}, {1: 2.0, 32: 40.0}):
        name, size = choose_tree(trees, ranks, sizes, overheads)
        cost = {n: interpolated_overhead(overheads, n) if overheads else 1.0 for n in range(1, 33)}
        speedups = {
            (of, n): simulated_acceleration_rate(ranks, tree[:n]) / cost[n]
            for of, tree in trees.items()
            for n in {min(n, len(tree)) for n in sizes}
        }
        assert speedups[name, size] == max(speedups.values())
    assert size == 1, "each node costs more than it can give"


@pytest.mark.parametrize(
    ("dearer", "chosen"),
    [
        (0.98, 2),  # two nodes are faster
        (1.02, 2),  # as fast, as far as can be measured: the rate decides
        (1.07, 1),  # one node is faster
    ],
)
def test_among_sizes_that_are_as_fast_the_rate_decides(dearer, chosen):
    ranks = of(np.random.default_rng(0).choice([0, 1, MISS], (1, 400)).astype(np.uint8), np.array([0]))
    trees = {"joint": ((0,), (1,))}
    one, two = (simulated_acceleration_rate(ranks, trees["joint"][:size]) for size in (1, 2))
    assert two / one > 1.1
    assert choose_tree(trees, ranks, (1, 2), {1: 1.0, 2: two / one * dearer}) == ("joint", chosen)


@pytest.mark.parametrize(("gained", "chosen"), [(0.0, 1), (0.005, 1), (0.03, 2)])
def test_a_rate_that_is_hardly_higher_is_not_worth_two_percent_of_speed(gained, chosen):
    """Though timing could not tell the two apart."""
    second = round(200 * gained)  # of 200 positions the first guess is right at half of them, never two in a row
    ranks = of(np.array([[0, MISS] * 100 + [1, MISS] * second], np.uint8), np.array([0]))
    trees = {"product": ((0,), (1,))}
    one, two = (simulated_acceleration_rate(ranks, trees["product"][:size]) for size in (1, 2))
    assert choose_tree(trees, ranks, (2, 1), {1: 1.0, 2: 1.02 * two / one}) == ("product", chosen)


def test_a_size_whose_overhead_is_unknown_is_not_chosen_and_where_none_is_known_one_is():
    ranks = of(np.array([[0, 1] * 50], np.uint8), np.array([0]))
    trees = {"joint": ((0,), (1,))}
    assert choose_tree(trees, ranks, (1, 2), {1: float("nan"), 2: 1.5}) == ("joint", 2)
    assert choose_tree(trees, ranks, (1, 2), {1: float("nan"), 2: float("nan")})[0] == "joint"


def test_a_head_that_is_never_right_still_gets_a_tree():
    ranks = of(np.full((2, 6), MISS, np.uint8), np.array([0, 3]))
    assert search_trees(ranks, 8, None, 5) == {"product": ((0,),), "joint": ((0,),)}


def test_the_walk_foretells_what_the_decoder_does(target_of, continuation, fitted_heads):
    """On the target's own greedy text, decoded with a tree, the rate is the walk's exactly."""
    model, prompts = target_of("llama"), ([3, 1, 4, 1, 5], [11, 2], [6, 6, 9, 4])
    texts = [continuation(model, prompt, 40) for prompt in prompts]
    heads = fitted_heads(model, [*prompts[0], *texts[0]], 3, known=0.7)
    parts = []
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.no_grad():
            hidden_TD = model.base_model(torch.tensor([prompt + text])).last_hidden_state[0]
        labels = [[text[t + 1 + k] if t + 1 + k < 40 else IGNORED for t in range(39)] for k in range(3)]
        next_N, labels_KN = torch.tensor(text[:39]), torch.tensor(labels)
        parts.append(label_ranks(heads, hidden_TD[len(prompt) - 1 :][:39], next_N, labels_KN, 4).numpy())
    ranks = of(np.concatenate(parts, axis=1), np.array([0, 39, 78]))
    choices, _ = joint_tree(ranks, 10)
    decoder = Decoder(model, heads, choices, eos_token_ids=())
    decoded = [decoder.generate(prompt, 40) for prompt in prompts]
    assert [one.token_ids for one in decoded] == texts
    assert simulated_acceleration_rate(ranks, choices) == pytest.approx(acceleration_rate(decoded))
    assert acceleration_rate(decoded) > 1.2, "the case must see guesses accepted"


def test_rank_accuracies_are_shares_of_single_guesses():
    accuracies = rank_accuracies(np.array([[5, 2, 0], [0, 1, 3]]), np.array([10, 8]))
    assert accuracies == [[0.5, pytest.approx(0.2), 0.0], [0.0, 0.125, 0.375]]
    assert rank_accuracies(np.array([[0, 0]]), np.array([0])) == [[0.0, 0.0]], "a head without labels"
