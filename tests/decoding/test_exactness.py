"""Over 200 prompts tree decoding and plain decoding write what the target's own `generate` in
transformers writes.
"""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.tree import cartesian_tree
from tests.decoding.conftest import VOCAB

OTHERS = ("mistral-window", "qwen2-tied-mixed-windows", "qwen3-head-dim")
FAMILIES = ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)]
TREES = [
    ((0,), (0, 0), (0, 0, 0)),
    cartesian_tree((3, 2, 2)),
    ((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (1, 0, 1)),
]
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
            settings = {
                "do_sample": False,
                "max_new_tokens": NUM_TOKENS,
                "attention_mask": torch.ones_like(prompts),
            }
            written = model.generate(prompts, **settings)[:, length:]
            found += zip(prompts.tolist(), written.tolist(), strict=True)
        return found

    return get


@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_prompts_are_answered_token_for_token(family, target_of, fitted_heads, answers):
    model = target_of(family)
    plain, kept = plain_decoder(model, eos_token_ids=()), Counter()
    for number, (prompt, expected) in enumerate(answers(family)):
        heads = fitted_heads(model, prompt + expected, 3, known=0.7)
        decoded = Decoder(model, heads, TREES[number % 3], eos_token_ids=()).generate(
            prompt, NUM_TOKENS
        )
        assert decoded.token_ids == expected, prompt
        assert plain.generate(prompt, NUM_TOKENS).token_ids == expected, prompt
        kept.update(decoded.accepted)
    assert min(kept[length] for length in (1, 2, 3, 4)) >= 5, (
        "the prompts must see paths of every length"
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_in_float32_answers_differ_at_ties_alone(family, target_of, fitted_heads, answers):
    exact = target_of(family)
    model = copy.deepcopy(exact).float()
    plain = plain_decoder(model, eos_token_ids=())
    for number, (prompt, expected) in enumerate(answers(family)):
        heads = fitted_heads(exact, prompt + expected, 3, known=0.7).float()
        decoded = Decoder(model, heads, TREES[number % 3], eos_token_ids=()).generate(
            prompt, NUM_TOKENS
        )
        for text in (decoded.token_ids, plain.generate(prompt, NUM_TOKENS).token_ids):
            same = next(
                (
                    i
                    for i, pair in enumerate(zip(text, expected, strict=True))
                    if len(set(pair)) > 1
                ),
                None,
            )
            if same is not None:
                with torch.no_grad():
                    logits = exact(input_ids=torch.tensor([prompt + expected[:same]])).logits[0, -1]
                best = logits.topk(2).values
                assert best[0] - best[1] < TIE, (prompt, same)
