"""Sampling with a tree: the target's distribution over whole texts, and the text that plain
sampling writes.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.decoding.acceptance import RejectionSampling, TypicalAcceptance
from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.tree import cartesian_tree
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape
from tests.decoding.conftest import PROMPT, SPARSE, seeded
from tests.decoding.steps import chi_square_p

FAMILIES = ("llama", "mistral-window", "qwen2-tied-mixed-windows", "gemma2-both-windows")
TINY_VOCAB, NUM_TOKENS, AT_ONCE = 4, 3, 50


@pytest.fixture(scope="module")
def tiny() -> tuple[LlamaForCausalLM, MedusaHeads]:
    """A target of four tokens, and heads that guess at random."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=TINY_VOCAB,
        max_position_embeddings=16,
        initializer_range=0.6,
    )
    heads = MedusaHeads(MedusaShape(16, TINY_VOCAB, 2), dtype=torch.float64)
    torch.nn.init.normal_(heads.lm_head)
    return LlamaForCausalLM(config).double().eval(), heads


@torch.no_grad()
def law_of_texts(model, prompt: list[int], temperature: float) -> dict[tuple[int, ...], float]:
    """The exact probability of every text: the product of the target's own."""
    texts = list(product(range(TINY_VOCAB), repeat=NUM_TOKENS))
    ids = torch.tensor([[*prompt, *text] for text in texts])
    logits = model(input_ids=ids).logits[:, len(prompt) - 1 : -1] / temperature
    chosen = logits.log_softmax(-1).gather(-1, ids[:, len(prompt) :, None]).sum((1, 2))
    return dict(zip(texts, chosen.exp().tolist(), strict=True))


def p_of_texts(
    model, heads, rule, temperature: float, num_texts: int
) -> tuple[float, Counter[int]]:
    """The chi-square test over all texts, and how many tokens the steps kept."""
    decoder = Decoder(model, heads, ((0,), (1,), (0, 0), (1, 1)), eos_token_ids=())
    counts, kept = Counter(), Counter()
    for first in range(0, num_texts, AT_ONCE):
        generators = [seeded(seed) for seed in range(first, first + AT_ONCE)]
        for decoded in decoder.generate_batch([[1, 2]] * AT_ONCE, NUM_TOKENS, rule, generators):
            counts[tuple(decoded.token_ids)] += 1
            kept.update(decoded.accepted)
    law = law_of_texts(model, [1, 2], temperature)
    return chi_square_p([counts[text] for text in law], list(law.values())), kept


@pytest.mark.slow
def test_texts_have_the_targets_own_distribution(tiny):
    p, kept = p_of_texts(*tiny, RejectionSampling(0.8), 0.8, 1_000)
    assert p > 1e-3
    assert kept[2] > 200, "guesses must have been accepted"


@pytest.mark.slow
def test_typical_acceptance_changes_the_distribution(tiny):
    """Shows that the test above can fail."""
    p, _ = p_of_texts(*tiny, TypicalAcceptance(0.8, samples=True), 0.8, 400)
    assert p < 1e-9


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
        for tree in (SPARSE, cartesian_tree((4, 2))):
            decoded = Decoder(model, heads, tree, eos_token_ids=()).generate(
                PROMPT, 24, rule, seeded(seed)
            )
            assert decoded.token_ids == expected
            kept.update(decoded.accepted)
        texts.add(tuple(expected))
    assert len(texts) == 8 and {1, 2, 3} <= kept.keys()


def test_typical_with_a_greedy_first_token_starts_greedily(target_of, continuation):
    model = target_of("llama")
    plain = plain_decoder(model, eos_token_ids=())
    found = plain.generate(PROMPT, 12, TypicalAcceptance(4.0)).token_ids
    assert found == continuation(model, PROMPT, 12)
