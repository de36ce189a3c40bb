"""Decoding on fake CUDA devices: one fetch per step, and nothing but kernels in a recorded one.

What the host reads is made up: of every tree a path is accepted that has to be moved in the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pipeline.decoding.acceptance import AcceptanceRule
from pipeline.decoding.decoder import Decoder
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.heads.kind import Heads
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.recurrent import RecurrentHeads
from pipeline.heads.shapes import MedusaShape, RecurrentShape
from tests.decoding.test_acceptance import RULES
from tests.fake_cuda.device import FakeGraphs
from tests.fake_cuda.ledger import Ledger
from tests.fake_cuda.observer import Observer

D, V, CONTEXT = 32, 40, 64
SIZES = {"hidden_size": D, "intermediate_size": 48, "vocab_size": V, "num_attention_heads": 4}
KINDS = {
    "untied": lambda: MedusaHeads(MedusaShape(D, V, 2)),
    "shared": lambda: MedusaHeads(MedusaShape(D, V, 2, lm_head="shared")),
    "tied": lambda: MedusaHeads(MedusaShape(D, V, 2, 2, lm_head="tied")),
    "recurrent": lambda: RecurrentHeads(RecurrentShape(D, V, 2, 64)),
    "draft vocabulary": lambda: RecurrentHeads(
        RecurrentShape(D, V // 2, 2, 64, target_vocab_size=V)
    ),
}
TREES = {"plain": (), "static": ((0,), (1,), (0, 0), (1, 0)), "dynamic": DynamicTree(7, 2, 3)}
PROMPTS = [
    [3, 1, 4, 1, 5],
    [7] * (CONTEXT - 3),
    [2],
]  # the second one meets the limit, and leaves the batch


def target_on(device: str, num_key_value_heads: int = 2, num_layers: int = 1) -> PreTrainedModel:
    sizes = SIZES | {"num_key_value_heads": num_key_value_heads, "num_hidden_layers": num_layers}
    config = LlamaConfig(**sizes, max_position_embeddings=CONTEXT)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)


def over_two_cards(target: PreTrainedModel) -> PreTrainedModel:
    """As accelerate places it: a module's inputs are brought to its weights; the model's output to
    its input.
    """
    for part in (target.model.layers[1], target.model.norm, target.lm_head):
        part.to("cuda:1")
    for part in (*target.model.layers, target.model.norm, target.lm_head):
        add_hook_to_module(
            part, AlignDevicesHook(next(part.parameters()).device, skip_keys="past_key_values")
        )
    return add_hook_to_module(
        target, AlignDevicesHook("cuda:0", io_same_device=True, skip_keys="past_key_values")
    )


def heads_on(device: str, kind: str) -> Heads:
    with torch.device(device):
        return KINDS[kind]().to(torch.bfloat16)


def accepts_two(found: torch.Tensor) -> list:
    """What the host reads of a step: the accepted row's depth, the rows and the tokens up to it,
    the next token.
    """
    row = [1, 0, 2] if found.dim() == 2 and found.shape[1] > 4 else []
    return (
        [row + [0] * (found.shape[1] - len(row))] * len(found)
        if found.dim() == 2
        else [0] * len(found)
    )


def check_decoding(seen: Observer, decoder: Decoder, rule: AcceptanceRule, batch: int) -> None:
    """Three steps: the host waits once for each and for each prefill, and fetches nothing else."""
    seen.answer = accepts_two
    seen.downloads.clear(), seen.waits.clear()
    generators = [torch.Generator("cuda") for _ in range(batch)]
    forwards = itertools.islice(
        decoder.stream_batch(PROMPTS[-batch:], 99, rule, generators), batch + 3
    )
    assert seen.waits == ["tolist"] * len(list(forwards)) and not seen.downloads


@pytest.fixture(autouse=True)
def one_warm_up(monkeypatch):
    monkeypatch.setattr("pipeline.decoding.cuda_graphs.WARM_UP_STEPS", 1)


def recorded(
    seen: Observer, target: PreTrainedModel, heads: Heads, tree, rule: AcceptanceRule, batch: int
) -> None:
    graphs = FakeGraphs(seen)
    check_decoding(
        seen, Decoder(target, heads, tree, eos_token_ids=(), graph_capture=graphs), rule, batch
    )
    assert graphs.num_captured


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule_in_a_recorded_batch(rule, on_fake_cuda):
    target, heads = target_on("cuda"), heads_on("cuda", "untied")
    for tree in TREES.values():
        recorded(on_fake_cuda, target, heads, tree, rule, 3)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [RULES[0], RULES[-1]], ids=["greedy", "sampled"])
def test_one_text_recorded_and_texts_that_are_not(rule, on_fake_cuda):
    target, heads = target_on("cuda"), heads_on("cuda", "untied")
    for tree in TREES.values():
        recorded(on_fake_cuda, target, heads, tree, rule, 1)
        decoder = Decoder(target, heads, tree, eos_token_ids=())
        check_decoding(on_fake_cuda, decoder, rule, 1)
        check_decoding(on_fake_cuda, decoder, rule, 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_head_and_a_target_over_two_cards(kind, on_fake_cuda):
    """Of which the second has the last layers, and the heads are on either."""
    for tree in (TREES["static"], TREES["dynamic"]):
        recorded(
            on_fake_cuda,
            target_on("cuda", num_key_value_heads=1),
            heads_on("cuda", kind),
            tree,
            RULES[0],
            3,
        )
    two_cards = over_two_cards(target_on("cuda:0", num_layers=2))
    for (tree, batch), card in itertools.product(
        ((TREES["static"], 3), (TREES["dynamic"], 1)), (0, 1)
    ):
        on_fake_cuda.transfers.clear()
        decoder = Decoder(two_cards, heads_on(f"cuda:{card}", kind), tree, eos_token_ids=())
        check_decoding(on_fake_cuda, decoder, RULES[0], batch)
        assert "cuda:0 -> cuda:1" in on_fake_cuda.transfers


@pytest.mark.slow
@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "not recorded"])
@pytest.mark.parametrize("tree", TREES)
def test_a_step_copies_no_key_of_the_cache(tree, is_recorded, on_fake_cuda):
    """Of grouped queries, with and without a tree: 4,096 slots that a step would otherwise expand
    twofold.
    """
    sizes = SIZES | {"num_key_value_heads": 2, "num_hidden_layers": 1, "head_dim": 256}
    config = LlamaConfig(**sizes, max_position_embeddings=4096)
    with torch.device("cuda"):
        target = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    graphs = FakeGraphs(on_fake_cuda) if is_recorded else None
    decoder = Decoder(
        target, heads_on("cuda", "untied"), TREES[tree], eos_token_ids=(), graph_capture=graphs
    )
    on_fake_cuda.answer = accepts_two
    steps = decoder.stream([3] * 4000, 12)
    next(steps), next(steps)
    with Ledger() as ledger, masks_of_attention() as masks:
        next(steps)
    keys = 2 * 4096 * 256 * 2  # bytes of a layer's
    assert ledger.peak["cuda:0"] < keys
    assert masks == [None] if tree == "plain" and not is_recorded else masks[0] is not None


@contextmanager
def masks_of_attention() -> Iterator[list[torch.Tensor | None]]:
    """The masks that torch's attention is given meanwhile."""
    found: list[torch.Tensor | None] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def noted(*tensors, attn_mask=None, **settings):
        found.append(attn_mask)
        return attention(*tensors, attn_mask=attn_mask, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
        patch.setattr("pipeline.decoding.grouped_attention.scaled_dot_product_attention", noted)
        yield found
