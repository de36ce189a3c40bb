"""Sampling with a tree writes what plain sampling writes: noise belongs to positions."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.decoding.acceptance import RejectionSampling
from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.tree import cartesian_tree
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape
from tests.decoding.conftest import PROMPT, SPARSE, seeded
from tests.decoding.steps import chi_square_p

FAMILIES = ("llama", "mistral-window", "qwen2-tied-mixed-windows", "gemma2-both-windows")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.9)])
def test_rejection_sampling_writes_what_plain_sampling_writes(
    family, temperature, top_p, target_of, fitted_heads
):
    model, rule = target_of(family), RejectionSampling(temperature, top_p)
    plain, kept, texts = plain_decoder(model, eos_token_ids=()), Counter(), set()
    for seed in range(8):
        expected = plain.generate(PROMPT, 24, rule, seeded(seed)).token_ids
        heads = fitted_heads(model, PROMPT + expected, 3, known=0.7)
        for tree in (SPARSE, cartesian_tree((4, 2)), DynamicTree(30, 3, 4)):
            decoder = Decoder(model, heads, tree, eos_token_ids=())
            decoded = decoder.generate(PROMPT, 24, rule, seeded(seed))
            assert decoded.token_ids == expected
            kept.update(decoded.accepted)
        texts.add(tuple(expected))
    assert len(texts) == 8 and {1, 2, 3} <= kept.keys()


@pytest.mark.slow
def test_texts_have_the_targets_own_distribution():
    """All texts of three of four tokens, by the product of the target's probabilities."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 4, "initializer_range": 0.6}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **layers)).double().eval()
    heads = MedusaHeads(MedusaShape(16, 4, 2), dtype=torch.float64)
    torch.nn.init.normal_(heads.lm_head)
    texts = torch.tensor(list(product(range(4), repeat=3)))
    ids = torch.cat((torch.tensor([[1, 2]]).expand(64, -1), texts), 1)
    with torch.no_grad():
        log_p = (model(input_ids=ids).logits[:, 1:-1] / 0.8).log_softmax(-1)
    law = log_p.gather(-1, texts[..., None]).sum((1, 2)).exp()

    decoder = Decoder(model, heads, ((0,), (1,), (0, 0), (1, 1)), eos_token_ids=())
    generators = list(map(seeded, range(1_000)))
    decoded = decoder.generate_batch([[1, 2]] * 1_000, 3, RejectionSampling(0.8), generators)
    counts = Counter(tuple(one.token_ids) for one in decoded)
    assert sum(2 in one.accepted for one in decoded) > 200, "guesses must be accepted"
    assert chi_square_p([counts[tuple(text)] for text in texts.tolist()], law.tolist()) > 1e-3
