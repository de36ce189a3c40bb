"""The walk takes decoding's own steps, and what each depth and each node adds sums to its rate."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.conversations.spans import IGNORED
from pipeline.decoding.decoder import Decoder, acceleration_rate
from pipeline.decoding.held_out import accepted_lengths, simulated_acceleration_rate, walk
from pipeline.decoding.tree_search import joint_tree
from pipeline.heads.accuracy import NO_LABEL, label_ranks
from tests.decoding.ranks import held_out, of


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


@settings(max_examples=100, deadline=None)
@given(ranks=held_out(), num_nodes=st.integers(1, 12))
def test_what_depths_and_nodes_add_to_a_step_sums_to_the_rate(ranks, num_nodes):
    choices, _ = joint_tree(ranks, num_nodes)
    walked = walk(ranks, choices)
    by_depth, by_node = walked.depth_shares(), walked.node_shares(ranks, choices)
    assert (
        1 + sum(by_depth)
        == pytest.approx(walked.acceleration_rate)
        == pytest.approx(1 + sum(by_node))
    )
    for depth, share in enumerate(by_depth, start=1):
        peers = [added for path, added in zip(choices, by_node, strict=True) if len(path) == depth]
        assert sum(peers) == pytest.approx(share)
    assert walked.estimate().rate == pytest.approx(walked.acceleration_rate)


def test_a_guess_that_ends_the_text_is_the_step_s_own_token_and_a_node_is_counted_where_it_is_kept():  # noqa: E501
    """Six positions, both heads always right: steps of 3, and of 3 of which nothing is cut; then
    one position less.
    """
    ranks = of(np.array([[0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, NO_LABEL]], np.uint8), np.array([0]))
    chain = ((0,), (0, 0))
    walked = walk(ranks, chain)
    assert (walked.places_S.tolist(), walked.kept_S.tolist()) == ([0, 3], [2, 2])
    assert walked.node_shares(ranks, chain) == [1.0, 1.0]
    shorter = of(ranks.ranks_KN[:, :5].copy(), np.array([0]))
    shorter.ranks_KN[1, 4] = NO_LABEL
    walked = walk(shorter, chain)
    assert walked.kept_S.tolist() == [2, 1] and walked.node_shares(shorter, chain) == [1.0, 0.5]


@settings(max_examples=30, deadline=None)
@given(ranks=held_out(least=2))
def test_walks_through_halves_together_are_one_through_all(ranks):
    one, other = ranks.halves()
    chain = ((0,), (0, 0))
    together, whole = walk(one, chain) + walk(other, chain), walk(ranks, chain)
    assert sorted(together.kept_S) == sorted(whole.kept_S)
    assert sorted(together.conversations_S) == sorted(whole.conversations_S)
    assert together.acceleration_rate == pytest.approx(whole.acceleration_rate)


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
        found = (
            [part.tolist() for part in np.split(half.ranks_KN, half.starts[1:], axis=1)]
            if len(half)
            else []
        )
        owners = ranks.conversations.tolist()
        assert found == [
            span for span, of in zip(spans, owners, strict=True) if numbers.index(of) % 2 == odd
        ]
        assert len(half.conversations) == len(half.starts)


def test_the_walk_foretells_what_the_decoder_does(target_of, continuation, fitted_heads):
    """On the target's own greedy text, decoded with a tree, the rate is the walk's exactly."""
    model, prompts = target_of("llama"), ([3, 1, 4, 1, 5], [11, 2], [6, 6, 9, 4])
    texts = [continuation(model, prompt, 40) for prompt in prompts]
    heads = fitted_heads(model, [*prompts[0], *texts[0]], 3, known=0.7)
    parts = []
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.no_grad():
            hidden_TD = model.base_model(torch.tensor([prompt + text])).last_hidden_state[0]
        labels = [
            [text[t + 1 + k] if t + 1 + k < 40 else IGNORED for t in range(39)] for k in range(3)
        ]
        next_N, labels_KN = torch.tensor(text[:39]), torch.tensor(labels)
        parts.append(
            label_ranks(heads, hidden_TD[len(prompt) - 1 :][:39], next_N, labels_KN, 4).numpy()
        )
    ranks = of(np.concatenate(parts, axis=1), np.array([0, 39, 78]))
    choices, _ = joint_tree(ranks, 10)
    decoder = Decoder(model, heads, choices, eos_token_ids=())
    decoded = [decoder.generate(prompt, 40) for prompt in prompts]
    assert [one.token_ids for one in decoded] == texts
    assert simulated_acceleration_rate(ranks, choices) == pytest.approx(acceleration_rate(decoded))
    assert acceleration_rate(decoded) > 1.2, "the case must see guesses accepted"


@settings(max_examples=60, deadline=None)
@given(ranks=held_out(), num_nodes=st.integers(1, 12))
def test_the_steps_in_new_answers_are_a_walk_through_these_alone(ranks, num_nodes):
    choices, _ = joint_tree(ranks, num_nodes)
    steps = walk(ranks, choices).new()
    lengths = np.diff(ranks.starts, append=len(ranks))
    kept = []
    for start, length, seen in zip(ranks.starts, lengths, ranks.seen, strict=True):
        if not seen:
            alone = of(ranks.ranks_KN[:, start : start + length], np.array([0]))
            kept += walk(alone, choices).kept_S.tolist()
    assert steps.kept_S.tolist() == kept
    assert len(ranks.new()) == sum(lengths[~ranks.seen])
