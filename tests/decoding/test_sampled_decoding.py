"""Sampling with a tree writes what plain sampling writes: noise belongs to positions."""

from __future__ import annotations

from collections import Counter

import pytest

from pipeline.decoding.acceptance import RejectionSampling
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.tree import cartesian_tree
from tests.decoding.conftest import PROMPT, SPARSE, endless, seeded

FAMILIES = ("llama", "mistral-window", "qwen2-tied-mixed-windows", "gemma2-both-windows")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.9)])
def test_rejection_sampling_writes_what_plain_sampling_writes(
    family, temperature, top_p, target_of, fitted_heads
):
    model, rule = target_of(family), RejectionSampling(temperature, top_p)
    plain, kept, texts = endless(model, None, ()), Counter(), set()
    for seed in range(8):
        expected = plain.generate(PROMPT, 24, rule, seeded(seed)).token_ids
        heads = fitted_heads(model, PROMPT + expected, 3, known=0.7)
        for tree in (SPARSE, cartesian_tree((4, 2)), DynamicTree(30, 3, 4)):
            decoder = endless(model, heads, tree)
            decoded = decoder.generate(PROMPT, 24, rule, seeded(seed))
            assert decoded.token_ids == expected
            kept.update(decoded.accepted)
        texts.add(tuple(expected))
    assert len(texts) == 8 and {1, 2, 3} <= kept.keys()
