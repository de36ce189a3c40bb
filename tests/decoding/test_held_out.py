"""Replays take the steps of decoding; standard errors are those of the bootstrap."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.decoding.decoder import acceleration_rate
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import (
    NUM_RESAMPLES,
    bootstrap_rate,
    replay,
    replay_dynamic,
)
from pipeline.decoding.tree_search import joint_tree
from pipeline.heads.accuracy import label_ranks
from tests.decoding.conftest import PROMPT, PROMPTS, endless, held_out_answers
from tests.decoding.ranks import held_out, ranks_of

CHAIN = ((0,), (0, 0))


@settings(max_examples=100, deadline=None)
@given(ranks=held_out(), num_nodes=st.integers(0, 12))
def test_a_replay_takes_decoding_s_steps_in_each_span(ranks, num_nodes):
    choices = joint_tree(ranks, num_nodes)
    truths = [tuple(column) for column in ranks.ranks_KN.T.tolist()]
    guessed = []
    for truth in truths:
        right = [len(path) for path in choices if truth[: len(path)] == path]
        guessed.append(max(right, default=0))
    kept, new = [], []
    bounds = itertools.pairwise([*ranks.starts.tolist(), len(ranks)])
    for (start, stop), seen in zip(bounds, ranks.seen, strict=True):
        while start < stop:  # the state at `start` is the root's
            kept.append(min(guessed[start], stop - start - 1))
            new += kept[-1:] * (not seen)
            start += guessed[start] + 1
    replayed = replay(ranks, choices)
    assert replayed.kept_S.tolist() == kept and replayed.new_answers().kept_S.tolist() == new
    assert sum(kept) + len(kept) == len(ranks), "every token is kept once"
    rate = pytest.approx(len(ranks) / len(kept))
    assert replayed.acceleration_rate == rate
    assert replayed.estimate().rate == rate


@settings(max_examples=40, deadline=None)
@given(ranks=held_out(least=2))
def test_halves_share_the_conversations_out(ranks):
    spans = np.split(ranks.ranks_KN, ranks.starts[1:], axis=1)
    numbers = list(dict.fromkeys(ranks.conversations.tolist()))
    for odd, half in enumerate(ranks.conversation_halves()):
        expected = []
        for span, owner in zip(spans, ranks.conversations.tolist(), strict=True):
            if numbers.index(owner) % 2 == odd:
                expected += span.T.tolist()
        assert half.ranks_KN.T.tolist() == expected
        assert len(half.conversations) == len(half.starts)


def test_the_rate_is_one_without_tree_nan_without_text():
    ranks = ranks_of(np.zeros((2, 5), np.uint8), np.array([0, 3]))
    assert replay(ranks, ()).acceleration_rate == 1.0
    nothing = ranks_of(np.zeros((2, 0), np.uint8), np.empty(0, np.int64))
    assert np.isnan(replay(nothing, ((0,),)).acceleration_rate)


@pytest.mark.parametrize("num_nodes", [1, pytest.param(9, marks=pytest.mark.slow), 36])
def test_replays_take_the_decoder_s_steps(num_nodes, target_of, continuation, fitted_heads):
    """On the target's own greedy text, with a static and with a dynamic tree."""
    model = target_of("llama")
    texts = [continuation(model, prompt, 40) for prompt in PROMPTS]
    heads = fitted_heads(model, PROMPT + texts[0], 3, known=0.7)
    heads.lm_head.data *= 8  # as sure as trained heads, so that dynamic trees differ
    dynamic, ranks, places = DynamicTree(num_nodes, 3, 4), [], []
    for roots, labels in held_out_answers(model, PROMPTS, texts, 3):
        ranks.append(label_ranks(heads, *roots, labels, 4).numpy())
        places.append(dynamic.places(heads, *roots, labels).numpy())
    starts = np.arange(len(PROMPTS)) * 39
    text = ranks_of(np.concatenate(ranks, axis=1), starts)
    choices = joint_tree(text, num_nodes)
    grown = replay_dynamic(ranks_of(np.concatenate(places, axis=1), starts), num_nodes)
    for tree, replayed in ((choices, replay(text, choices)), (dynamic, grown)):
        decoder = endless(model, heads, tree)
        decoded = [decoder.generate(prompt, 40) for prompt in PROMPTS]
        assert [one.token_ids for one in decoded] == texts
        assert (replayed.kept_S + 1).tolist() == [kept for one in decoded for kept in one.accepted]
        assert replayed.acceleration_rate == pytest.approx(acceleration_rate(decoded))
        assert replayed.acceleration_rate > 1.05, "guesses must be accepted"


def test_the_standard_error_is_the_bootstrap_s_over_conversations():
    """Resample conversations one by one, with other random numbers."""
    found = [(9, 3), (4, 4), (12, 5), (7, 2), (10, 6), (3, 3), (8, 4), (30, 10)]
    rng, rates = np.random.default_rng(1), []
    for _ in range(4 * NUM_RESAMPLES):
        drawn = [found[i] for i in rng.integers(len(found), size=len(found))]
        rates.append(sum(tokens for tokens, _ in drawn) / sum(steps for _, steps in drawn))
    tokens, steps = zip(*found, strict=True)
    estimate = bootstrap_rate(tokens, steps)
    assert estimate.rate == pytest.approx(sum(tokens) / sum(steps))
    expected = math.sqrt(len(found) / (len(found) - 1)) * statistics.pstdev(rates)
    assert estimate.standard_error == pytest.approx(expected, rel=0.1)
    assert estimate == bootstrap_rate([*tokens, 0], [*steps, 0]), "none without a step counts"


def test_one_conversation_has_no_known_error():
    alone, nothing = bootstrap_rate([6], [2]), bootstrap_rate([], [])
    assert alone.rate == 3 and math.isnan(alone.standard_error)
    assert math.isnan(nothing.rate) and math.isnan(nothing.standard_error)
    steps = [10, 9, 11]
    assert bootstrap_rate([3 * n for n in steps], steps).standard_error == pytest.approx(0)
