"""Over 200 prompts tree decoding and plain decoding write what the target's own `generate` in
transformers writes.
"""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.steps import last_positions
from pipeline.decoding.tree import cartesian_tree
from tests.decoding.conftest import CHAIN, SPARSE, VOCAB

OTHERS = ("mistral-window", "qwen2-tied-mixed-windows", "qwen3-head-dim")
FAMILIES = ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)]
TREES = [CHAIN, cartesian_tree((3, 2, 2)), SPARSE]
LENGTHS, PROMPTS_PER_LENGTH, NUM_TOKENS = (1, 3, 8, 13, 21), 10, 20
TIE = 1e-4  # of the target's two best logits


@pytest.fixture(scope="module")
def answers(target_of):
    """50 prompts of a family, each with what transformers itself writes after it."""

    def get(family: str) -> list[tuple[list[int], list[int]]]:
        model, found = target_of(family), []
        generator = torch.Generator().manual_seed(len(family))
        for length in LENGTHS:
            prompts = torch.randint(VOCAB, (PROMPTS_PER_LENGTH, length), generator=generator)
            model.generation_config.eos_token_id = None
            settings = {"do_sample": False, "max_new_tokens": NUM_TOKENS}
            settings["attention_mask"] = torch.ones_like(prompts)
            written = model.generate(prompts, **settings)[:, length:]
            found += zip(prompts.tolist(), written.tolist(), strict=True)
        return found

    return get


@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_prompts_are_answered_but_for_ties(dtype, family, target_of, fitted_heads, answers):
    """In float64 token for token."""
    exact, kept = target_of(family), Counter()
    model = copy.deepcopy(exact).to(dtype)
    plain = plain_decoder(model, eos_token_ids=())
    for number, (prompt, expected) in enumerate(answers(family)):
        heads = fitted_heads(exact, prompt + expected, 3, known=0.7).to(dtype)
        decoder = Decoder(model, heads, TREES[number % 3], eos_token_ids=())
        decoded = [one.generate(prompt, NUM_TOKENS) for one in (decoder, plain)]
        kept.update(decoded[0].accepted)
        for one in decoded:
            pairs = enumerate(zip(one.token_ids, expected, strict=True))
            place = next((place for place, (token, right) in pairs if token != right), None)
            if place is not None:
                assert dtype == torch.float32, prompt
                _, logits = last_positions(exact, prompt + expected[:place], 1)
                best = logits[0].topk(2).values
                assert best[0] - best[1] < TIE, (prompt, place)
    assert min(kept[length] for length in (1, 2, 3, 4)) >= 5, "paths of every length are kept"
