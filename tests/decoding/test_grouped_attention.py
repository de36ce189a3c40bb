"""Attention of grouped queries under a mask equals transformers' attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pipeline.decoding.grouped_attention import NAME, GroupedRows, grouped_attention


@pytest.mark.parametrize("batch, rows", [(1, 1), (1, 6), (3, 1), (3, 6)])
@pytest.mark.parametrize("num_groups", [1, 4])
def test_it_is_the_attention_of_expanded_keys(batch, rows, num_groups):
    generator = torch.Generator().manual_seed(rows)
    draw = lambda *sizes: torch.randn(*sizes, generator=generator, dtype=torch.float64)  # noqa: E731
    query = draw(batch, rows, 2 * num_groups, 8).transpose(1, 2)  # as a projection leaves it
    key, value = draw(batch, 2, 10, 8), draw(batch, 2, 10, 8)
    mask = draw(batch, 1, rows, 10).where(
        draw(batch, 1, rows, 10) > 0, torch.finfo(torch.float64).min
    )
    module = SimpleNamespace(num_key_value_groups=num_groups, is_causal=True)
    for one in (mask, None):
        expected, _ = sdpa_attention_forward(module, query, key, value, one, scaling=0.3)
        found, _ = grouped_attention(module, query, key, value, one, scaling=0.3)
        assert found.is_contiguous() and torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_a_model_s_own_attention_is_back_after_each_forward(target_of):
    model, eager = target_of("llama"), target_of("llama-eager")
    with GroupedRows(model).grouped(), GroupedRows(eager).grouped():
        assert (model.config._attn_implementation, eager.config._attn_implementation) == (
            NAME,
            "eager",
        )
    assert model.config._attn_implementation == "sdpa"
