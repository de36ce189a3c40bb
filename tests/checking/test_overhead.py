"""What trees cost is measured in room that the steps need, and not on trees that could never pay."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.checking import overhead
from pipeline.checking.overhead import NUM_STEPS, fastest_threads, overhead_curve
from pipeline.medusa.cache import TreeCache
from pipeline.medusa.decoding import plain_decoder
from pipeline.medusa.heads import HeadsConfig, MedusaHeads

CHAIN = ((0,), (0, 0))
TREES = {1: CHAIN[:1], 2: CHAIN, 4: (*CHAIN, (1,), (1, 0))}


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=50, max_position_embeddings=131_072)).eval()
    return model, MedusaHeads(HeadsConfig(32, 50, 2, 1, False)).eval()


def test_a_long_context_costs_no_more_cache_than_the_steps_need(pair, monkeypatch):
    asked: list[int] = []
    begin = TreeCache.begin
    monkeypatch.setattr(TreeCache, "begin", lambda self, slots, *n: (asked.append(slots), begin(self, slots, *n))[1])
    curve = overhead_curve(*pair, TREES, [5] * 20, 131_072)
    assert curve.keys() == TREES.keys() and all(cost > 0 for cost in curve.values())
    assert max(asked) <= 20 + 1 + NUM_STEPS * 3 + 1 + 4


def test_overheads_are_ratios_of_medians_and_what_cannot_pay_is_left_out(pair, monkeypatch):
    cost = {0: 1.0, 1: 1.5, 2: 2.0, 4: 3.5}  # at most 3 tokens per step
    monkeypatch.setattr(overhead, "_seconds_per_step", lambda decoder, *_: 0.01 * cost[decoder.tree.num_nodes])
    assert overhead_curve(*pair, TREES, [5], 99) == {1: pytest.approx(1.5), 2: pytest.approx(2.0)}
    cost[1] = 9.0
    assert overhead_curve(*pair, TREES, [5], 99).keys() >= {1}, "one is always measured"


def test_plain_steps_choose_the_number_of_threads_for_as_long_as_they_are_measured(pair, monkeypatch):
    before, cost = torch.get_num_threads(), {1: 0.03, 2: 0.01, 4: 0.02}
    monkeypatch.setattr(overhead, "_seconds_per_step", lambda *_: cost[torch.get_num_threads()])
    try:
        torch.set_num_threads(4)
        with fastest_threads(plain_decoder(pair[0], eos_token_ids=()), [5]) as threads:
            assert threads == torch.get_num_threads() == 2
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_a_target_whose_steps_are_long_gets_all_threads_and_nothing_is_tried(pair, monkeypatch):
    before, asked = torch.get_num_threads(), []
    monkeypatch.setattr(overhead, "_seconds_per_step", lambda *_: asked.append(torch.get_num_threads()) or 0.5)
    try:
        torch.set_num_threads(4)
        with fastest_threads(plain_decoder(pair[0], eos_token_ids=()), [5]) as threads:
            assert threads == torch.get_num_threads() == 4
        assert asked == [4]
    finally:
        torch.set_num_threads(before)
