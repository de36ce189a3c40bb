"""What trees cost is measured in room that the steps need, and not on trees that could never
pay.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.decoding.cache import TreeCache
from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.evaluation import overhead
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
def pair():
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(
        LlamaConfig(**shape, vocab_size=50, max_position_embeddings=131_072)
    ).eval()
    return model, MedusaHeads(MedusaShape(32, 50, 2, 1)).eval()


def test_a_long_context_costs_no_more_cache_than_the_steps_need(pair, monkeypatch):
    asked: list[int] = []
    begin = TreeCache.begin
    monkeypatch.setattr(
        TreeCache, "begin", lambda self, slots, *n: (asked.append(slots), begin(self, slots, *n))[1]
    )
    curve = overhead_curve(*pair, TREES, [[5] * 20, [7] * 9], 131_072)
    assert curve.keys() == TREES.keys() and all(cost > 0 for cost in curve.values())
    assert max(asked) <= 20 + 1 + NUM_STEPS * 3 + 1 + 4


def test_overheads_are_ratios_of_steps_and_what_cannot_pay_is_left_out(pair, monkeypatch):
    cost = {0: 1.0, 1: 1.5, 2: 2.0, 4: 3.5}  # at most 3 tokens per step
    monkeypatch.setattr(
        overhead, "step_seconds", lambda decoder, _: [0.01 * cost[decoder.tree.num_nodes]] * 8
    )
    assert overhead_curve(*pair, TREES, [[5]], 99) == {1: pytest.approx(1.5), 2: pytest.approx(2.0)}
    cost[1] = 9.0
    assert overhead_curve(*pair, TREES, [[5]], 99).keys() >= {1}, "one is always measured"


def test_steps_that_other_work_interrupts_do_not_count(pair, monkeypatch):
    """Half of them, of any decoder, by any amount."""
    cost, delays = (
        {0: 0.01, 1: 0.015, 2: 0.02, 4: 0.025},
        itertools.cycle([0.0, 0.3, 0.0, 0.07, 1.0, 0.0]),
    )

    def step_seconds(decoder, _):
        return [cost[decoder.tree.num_nodes] + next(delays) for _ in range(8)]

    monkeypatch.setattr(overhead, "step_seconds", step_seconds)
    decoders = {size: Decoder(*pair, tree, eos_token_ids=()) for size, tree in TREES.items()}
    found = overheads(plain_decoder(pair[0], eos_token_ids=()), decoders, [[5]] * 3)
    assert found == {1: pytest.approx(1.5), 2: pytest.approx(2.0), 4: pytest.approx(2.5)}


def test_every_step_is_timed_and_the_prefill_is_not(pair, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(overhead, "perf_counter", lambda: float(next(clock)))
    plain = plain_decoder(pair[0], eos_token_ids=(), max_length=12)
    assert step_seconds(plain, [5]) == [1.0] * NUM_STEPS
    assert step_seconds(plain, [5] * 9) == [1.0] * 2, (
        "the prefill gives one of the three for which there is room"
    )


def test_plain_steps_choose_the_number_of_threads_for_as_long_as_they_are_measured(
    pair, monkeypatch
):
    before, cost = torch.get_num_threads(), {1: 0.03, 2: 0.01, 4: 0.02}
    monkeypatch.setattr(overhead, "step_seconds", lambda *_: [cost[torch.get_num_threads()]])
    try:
        torch.set_num_threads(4)
        with fastest_threads(plain_decoder(pair[0], eos_token_ids=()), [5]) as threads:
            assert threads == torch.get_num_threads() == 2
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_a_target_whose_steps_are_long_gets_all_threads_and_nothing_is_tried(pair, monkeypatch):
    before, asked = torch.get_num_threads(), []
    monkeypatch.setattr(
        overhead, "step_seconds", lambda *_: asked.append(torch.get_num_threads()) or [0.5]
    )
    try:
        torch.set_num_threads(4)
        with fastest_threads(plain_decoder(pair[0], eos_token_ids=()), [5]) as threads:
            assert threads == torch.get_num_threads() == 4
        assert asked == [4]
    finally:
        torch.set_num_threads(before)
