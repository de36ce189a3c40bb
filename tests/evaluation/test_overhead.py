"""The cost of trees: a step's seconds over a plain step's."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from pipeline.decoding.cache import TreeCache
from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.held_out import HeldOutRanks
from pipeline.evaluation import overhead
from pipeline.evaluation.choosing import chosen_chain
from pipeline.evaluation.overhead import (
    NUM_STEPS,
    fastest_threads,
    overhead_curve,
    overheads,
    step_seconds,
)
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape

CHAIN = ((0,), (0, 0))
TREES = {1: CHAIN[:1], 2: CHAIN, 4: (*CHAIN, (1,), (1, 0))}


@pytest.fixture(scope="module")
def pair(model):
    return model, MedusaHeads(MedusaShape(64, 300, 2, 1)).eval()


@pytest.fixture(scope="module")
def plain(pair) -> Decoder:
    return plain_decoder(pair[0], eos_token_ids=(), max_length=12)


def test_the_cache_is_sized_for_steps_not_context(pair, monkeypatch):
    asked: list[int] = []
    begin = TreeCache.begin_batch

    def counted(cache, slots, *arguments):
        asked.append(slots)
        return begin(cache, slots, *arguments)

    monkeypatch.setattr(TreeCache, "begin_batch", counted)
    curve = overhead_curve(*pair, TREES, [[5] * 20, [7] * 9], 131_072)
    assert 1 in curve and all(cost > 0 for cost in curve.values())
    assert 20 + 1 + NUM_STEPS * 3 + 1 + 4 < 256, "slots are allocated in multiples of 256"
    assert max(asked) == 256


def test_trees_that_cannot_pay_are_left_out(pair, monkeypatch):
    cost = {0: 1.0, 1: 1.5, 2: 2.0, 4: 3.5}  # at most 3 tokens per step
    monkeypatch.setattr(
        overhead, "step_seconds", lambda decoder, _: [0.01 * cost[decoder.tree.num_nodes]] * 8
    )
    assert overhead_curve(*pair, TREES, [[5]], 99) == {1: pytest.approx(1.5), 2: pytest.approx(2.0)}
    cost[1] = 9.0
    assert overhead_curve(*pair, TREES, [[5]], 99).keys() >= {1}, "one is always measured"


def test_interrupted_steps_do_not_count(pair, plain, monkeypatch):
    """Half of them, of any decoder, by any amount."""
    cost = {0: 0.01, 1: 0.015, 2: 0.02, 4: 0.025}
    delays = itertools.cycle([0.0, 0.3, 0.0, 0.07, 1.0, 0.0])

    def seconds(decoder, _):
        return [cost[decoder.tree.num_nodes] + next(delays) for _ in range(8)]

    monkeypatch.setattr(overhead, "step_seconds", seconds)
    decoders = {size: Decoder(*pair, tree, eos_token_ids=()) for size, tree in TREES.items()}
    found = overheads(plain, decoders, [[5]] * 3)
    assert found == {1: pytest.approx(1.5), 2: pytest.approx(2.0), 4: pytest.approx(2.5)}


def test_every_step_is_timed_and_the_prefill_is_not(plain, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(overhead, "perf_counter", lambda: float(next(clock)))
    assert step_seconds(plain, [5]) == [1.0] * NUM_STEPS
    assert step_seconds(plain, [5] * 9) == [1.0] * 2, "three tokens fit, one is the prefill's"


@pytest.mark.parametrize(
    ("cost", "best", "tried"),
    [({1: 0.03, 2: 0.01, 4: 0.02}, 2, {1, 2, 4}), ({4: 0.5}, 4, {4})],
    ids=["short steps", "long steps"],
)
def test_the_fastest_number_of_threads_is_set_for_a_while(plain, monkeypatch, cost, best, tried):
    """A target whose steps are long gets all threads, and nothing is tried."""
    before, asked = torch.get_num_threads(), set()

    def seconds(*_):
        asked.add(torch.get_num_threads())
        return [cost[torch.get_num_threads()]]

    monkeypatch.setattr(overhead, "step_seconds", seconds)
    try:
        torch.set_num_threads(4)
        with fastest_threads(plain, [5]):
            assert torch.get_num_threads() == best
        assert torch.get_num_threads() == 4 and asked == tried
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("costs", "drafted"),
    [
        ({1: 1.0, 2: 1.2}, 2),  # 2 tokens a step, or 3 in 1.2 times the time
        ({1: 1.0, 2: 2.0}, 1),
        ({1: 1.5, 2: math.nan}, 1),
        ({}, 5),
    ],
)
def test_the_chain_is_as_long_as_is_fastest(costs, drafted):
    """Two conversations of 60 positions, at which the first guesses of both heads are right."""
    starts, conversations = np.array([0, 60]), np.array([0, 1])
    ranks = HeldOutRanks(np.zeros((2, 120), np.uint8), starts, conversations, np.zeros(2, bool))
    num_tokens, (one, two) = chosen_chain(ranks, 2, 5, costs)
    assert num_tokens == drafted
    assert one.expected_acceleration_rate == 2.0 and two.expected_acceleration_rate == 3.0
    assert one.expected_speedup == (pytest.approx(2 / costs[1], rel=1e-3) if costs else None)


def test_seen_answers_are_not_in_the_rate_expected():
    """Eight new answers take one step of two tokens; a seen one takes two steps."""
    ranks_1N = np.repeat([[0, 1]], [16, 2], axis=1)
    answers = np.arange(9)
    _, (chain,) = chosen_chain(HeldOutRanks(ranks_1N, 2 * answers, answers, answers == 8), 1, 1, {})
    assert chain.expected_acceleration_rate == 1.8
    assert (chain.new.answers, chain.new.expected_acceleration_rate) == (8, 2.0)
