"""Heads with a draft vocabulary, for the tests."""

from __future__ import annotations

from collections.abc import Collection

import torch

from pipeline.heads.kind import Heads


def pruned(heads: Heads, tokens: Collection[int]) -> Heads:
    """Restrict heads to a draft vocabulary of these tokens."""
    kept, first = torch.tensor(sorted(tokens)), next(heads.parameters())
    found = type(heads)(heads.shape.drafting(len(kept)), dtype=first.dtype)
    found.vocabulary.fill(kept)
    for name, weight in heads.named_parameters():
        found.get_parameter(name).data.copy_(weight[..., kept, :] if name == "lm_head" else weight)
    return found
