"""Over 200 prompts decoding with and without a tree writes what transformers' `generate` writes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.tree import cartesian_tree
from tests.decoding.conftest import CHAIN, SPARSE, VOCAB, seeded

OTHERS = ("mistral-window", "qwen2-tied-mixed-windows", "qwen3-head-dim")
FAMILIES = ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)]
TREES = [CHAIN, cartesian_tree((3, 2, 2)), SPARSE]
LENGTHS = (1, 3, 8, 13, 21)


@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_prompts_are_answered_token_for_token(family, target_of, fitted_heads, continuation):
    model, kept, generator = target_of(family), Counter(), seeded(len(family))
    plain = plain_decoder(model, eos_token_ids=())
    for number in range(50):
        length = LENGTHS[number % 5]
        prompt = torch.randint(VOCAB, (length,), generator=generator).tolist()
        expected = continuation(model, prompt, 20)
        heads = fitted_heads(model, prompt + expected, 3, known=0.7)
        decoded = Decoder(model, heads, TREES[number % 3], eos_token_ids=()).generate(prompt, 20)
        assert decoded.token_ids == plain.generate(prompt, 20).token_ids == expected, prompt
        kept.update(decoded.accepted)
    assert min(kept[length] for length in (1, 2, 3, 4)) >= 5, "paths of every length are kept"
