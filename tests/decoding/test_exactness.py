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


def decoded_texts(model, heads, number: int, prompt: list[int]):
    """The text with a tree, the text without, and how many tokens the tree's steps kept."""
    decoded = Decoder(model, heads, TREES[number % 3], eos_token_ids=()).generate(
        prompt, NUM_TOKENS
    )
    plain = plain_decoder(model, eos_token_ids=()).generate(prompt, NUM_TOKENS)
    return decoded.token_ids, plain.token_ids, decoded.accepted


@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_prompts_are_answered_token_for_token(family, target_of, fitted_heads, answers):
    model, kept = target_of(family), Counter()
    for number, (prompt, expected) in enumerate(answers(family)):
        heads = fitted_heads(model, prompt + expected, 3, known=0.7)
        with_tree, without, accepted = decoded_texts(model, heads, number, prompt)
        assert with_tree == without == expected, prompt
        kept.update(accepted)
    assert min(kept[length] for length in (1, 2, 3, 4)) >= 5, "paths of every length are kept"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_in_float32_answers_differ_at_ties_alone(family, target_of, fitted_heads, answers):
    exact = target_of(family)
    model = copy.deepcopy(exact).float()
    for number, (prompt, expected) in enumerate(answers(family)):
        heads = fitted_heads(exact, prompt + expected, 3, known=0.7).float()
        for text in decoded_texts(model, heads, number, prompt)[:2]:
            for place, (token, right) in enumerate(zip(text, expected, strict=True)):
                if token != right:
                    _, logits = last_positions(exact, prompt + expected[:place], 1)
                    best = logits[0].topk(2).values
                    assert best[0] - best[1] < TIE, (prompt, place)
                    break
