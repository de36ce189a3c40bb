"""Over 200 prompts decoding with and without a tree writes what transformers' `generate` writes."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.steps import last_positions
from pipeline.decoding.tree import cartesian_tree
from tests.decoding.conftest import CHAIN, SPARSE, VOCAB, seeded

OTHERS = ("mistral-window", "qwen2-tied-mixed-windows", "qwen3-head-dim")
FAMILIES = ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)]
DTYPES = [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)]
TREES = [CHAIN, cartesian_tree((3, 2, 2)), SPARSE]
LENGTHS, NUM_TOKENS = (1, 3, 8, 13, 21), 20
TIE = 1e-4  # of the target's two best logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_prompts_are_answered_but_for_ties(
    dtype, family, target_of, fitted_heads, continuation
):
    """The answers in float64 are equal token for token."""
    exact, kept, generator = target_of(family), Counter(), seeded(len(family))
    model = copy.deepcopy(exact).to(dtype)
    plain = plain_decoder(model, eos_token_ids=())
    for number in range(50):
        length = LENGTHS[number % 5]
        prompt = torch.randint(VOCAB, (length,), generator=generator).tolist()
        expected = continuation(exact, prompt, NUM_TOKENS)
        heads = fitted_heads(exact, prompt + expected, 3, known=0.7).to(dtype)
        decoder = Decoder(model, heads, TREES[number % 3], eos_token_ids=())
        decoded = [one.generate(prompt, NUM_TOKENS) for one in (decoder, plain)]
        kept.update(decoded[0].accepted)
        for one in decoded:
            for place, token in enumerate(one.token_ids):
                if token != expected[place]:
                    assert dtype == torch.float32, prompt
                    _, logits = last_positions(exact, prompt + expected[:place], 1)
                    best = logits[0].topk(2).values
                    assert best[0] - best[1] < TIE, (prompt, place)
                    break
    assert min(kept[length] for length in (1, 2, 3, 4)) >= 5, "paths of every length are kept"
