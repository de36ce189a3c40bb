"""Grouped-query attention with a mask, without expanding keys and values.

With a mask, transformers repeats every key and value for each query head of its group, because
torch's flash kernel takes no mask and its memory-efficient kernel takes no grouped queries. A
decoding step with a tree mask would copy the whole KV cache several times. Here the queries of a
group become rows of one head: the products are the same, and any kernel that takes a mask can
compute them.

Letters: B sequences, H key-value heads, G query heads of each, N rows, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "sdpa_grouped_rows"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute grouped-query attention with the queries of a group as rows of one head.

    Shapes: queries [B, H·G, N, D], keys and values [B, H, S, D], additive masks [B, 1, N, S],
    result [B, N, H·G, D]. The second result, attention weights, is None. Attention without groups
    or without a mask is computed by transformers.
    """
    num_groups = query.shape[1] // key.shape[1]
    if num_groups == 1 or attention_mask is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **settings
        )
    rows_BHND = query.unflatten(1, (-1, num_groups)).flatten(2, 3)
    num_rows = query.shape[2]
    attention_mask = attention_mask.repeat(1, 1, num_groups, 1)
    read_BHND = scaled_dot_product_attention(
        rows_BHND, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    read_BHND = read_BHND.unflatten(2, (num_groups, num_rows)).flatten(1, 2)
    return read_BHND.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class GroupedRows:
    """Temporary replacement of a model's sdpa attention by `grouped_attention`.

    Parts of the model with another attention implementation are left as they are.
    """

    def __init__(self, model: PreTrainedModel):
        self._configs = []
        for part in model.modules():
            config = getattr(part, "config", None)
            if config is not None and config._attn_implementation == "sdpa":
                self._configs.append(config)

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Context manager that replaces sdpa by `grouped_attention` and restores it at the end."""
        for config in self._configs:
            config._attn_implementation_internal = NAME
        try:
            yield
        finally:
            for config in self._configs:
                config._attn_implementation_internal = "sdpa"
