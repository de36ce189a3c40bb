"""Decoding on fake CUDA devices: one fetch per step, and nothing but kernels in a recorded one.

The numbers that the host reads are made up: of every tree one guess is accepted.
"""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.decoding import cuda_graphs
from pipeline.decoding.decoder import Decoder
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.recurrent import RecurrentHeads
from pipeline.heads.shapes import MedusaShape, RecurrentShape
from tests.decoding.test_acceptance import RULES
from tests.fake_cuda.device import FakeGraphs
from tests.fake_cuda.ledger import Ledger
from tests.tiny_models import SIZES

D, V, CONTEXT = 32, 40, 64
KINDS = {
    "untied": MedusaShape(D, V, 2),
    "shared": MedusaShape(D, V, 2, lm_head="shared"),
    "tied": MedusaShape(D, V, 2, 2, lm_head="tied"),
    "recurrent": RecurrentShape(D, V, 2, 64),
    "draft vocabulary": RecurrentShape(D, V // 2, 2, 64, target_vocab_size=V),
}
TREES = {"plain": (), "static": ((0,), (1,), (0, 0), (1, 0)), "dynamic": DynamicTree(7, 2, 3)}
# the second one meets the limit, and leaves the batch
PROMPTS = [[3, 1, 4, 1, 5], [7] * (CONTEXT - 3), [2]]


def target_on(device, context=CONTEXT, **changes):
    usual = {"num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": context}
    config = LlamaConfig(**SIZES | usual | changes)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)


def over_two_cards(target):
    """Place the target on two cards as accelerate does.

    A module's inputs move to its weights, the model's output to its input's device.
    """
    second = (target.model.layers[1], target.model.norm, target.lm_head)
    for part in second:
        part.to("cuda:1")
    devices = {target.model.layers[0]: "cuda:0", **dict.fromkeys(second, "cuda:1")}
    for part, device in devices.items():
        add_hook_to_module(part, AlignDevicesHook(device, skip_keys="past_key_values"))
    both = AlignDevicesHook("cuda:0", io_same_device=True, skip_keys="past_key_values")
    return add_hook_to_module(target, both)


def heads_on(device, kind):
    shape = KINDS[kind]
    heads = MedusaHeads if isinstance(shape, MedusaShape) else RecurrentHeads
    with torch.device(device):
        return heads(shape).to(torch.bfloat16)


def accepts_two(found):
    """The numbers that the host reads of a step: the accepted row's depth, the tokens up to it,
    the next token.
    """
    if found.dim() < 2:
        return [0] * len(found)
    row = [0] * found.shape[1]
    if len(row) > 3:
        row[0] = 1
    return [row] * len(found)


@pytest.fixture
def check_decoding(on_fake_cuda, monkeypatch):
    """Three steps: the host waits once for each and for each prefill, and fetches nothing else."""
    monkeypatch.setattr(cuda_graphs, "WARM_UP_STEPS", 1)
    on_fake_cuda.answer = accepts_two

    def check(target, heads, tree, rule, batch, *, recorded):
        graphs = FakeGraphs(on_fake_cuda) if recorded else None
        decoder = Decoder(target, heads, tree, eos_token_ids=(), graph_capture=graphs)
        generators = [torch.Generator("cuda") for _ in range(batch)]
        forwards = decoder.stream_batch(PROMPTS[-batch:], 99, rule, generators)
        on_fake_cuda.clear()
        num_forwards = len(list(islice(forwards, batch + 3)))
        assert on_fake_cuda.waits == ["tolist"] * num_forwards and not on_fake_cuda.downloads
        assert graphs is None or graphs.num_captured

    return check


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule_fetches_once_per_step(rule, check_decoding):
    target, heads = target_on("cuda"), heads_on("cuda", "untied")
    for tree in TREES.values():
        check_decoding(target, heads, tree, rule, 3, recorded=True)
        if rule is RULES[0]:
            check_decoding(target, heads, tree, rule, 1, recorded=True)
            check_decoding(target, heads, tree, rule, 3, recorded=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_heads_on_one_card_and_two(kind, check_decoding):
    """The second of two cards has the last layers; the heads are on either."""
    target, heads = target_on("cuda", num_key_value_heads=1), heads_on("cuda", kind)
    for tree in ("static", "dynamic"):
        check_decoding(target, heads, TREES[tree], RULES[0], 3, recorded=True)
    target = over_two_cards(target_on("cuda:0", num_hidden_layers=2))
    for card, tree, batch in (("cuda:0", "static", 3), ("cuda:1", "dynamic", 1)):
        heads = heads_on(card, kind)
        check_decoding(target, heads, TREES[tree], RULES[0], batch, recorded=False)


@pytest.mark.slow
@pytest.mark.parametrize("tree", TREES)
def test_a_step_copies_no_key_of_the_cache(tree, on_fake_cuda):
    """A step would expand 4,096 slots of grouped queries twofold, with and without a tree."""
    target, heads = target_on("cuda", 4096, head_dim=256), heads_on("cuda", "untied")
    decoder = Decoder(target, heads, TREES[tree], eos_token_ids=())
    on_fake_cuda.answer = accepts_two
    steps = decoder.stream([3] * 4000, 12)
    next(steps), next(steps)
    with Ledger() as ledger:
        next(steps)
    assert ledger.peak["cuda:0"] < 2 * 4096 * 256 * 2  # bytes of a layer's keys
