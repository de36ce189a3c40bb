"""Samples the next token of each row of a batch, with the row's own settings and generator.

A row's sample depends only on its logits and its generator, not on the batch. Temperature is applied before top-p, as
in vLLM and transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.conversations.requests import Request

# B batch, V vocabulary


def sample_tokens(
    logits_BV: torch.Tensor, requests: Sequence[Request], generators: Sequence[torch.Generator | None]
) -> torch.Tensor:
    """Token ids [B]: the argmax where a request's temperature is 0, otherwise a sample with the row's generator.

    The argmax of p / e with e ~ Exp(1) is distributed as p.
    """
    next_B = logits_BV.argmax(dim=-1)
    drawn = [row for row, request in enumerate(requests) if request.temperature > 0]
    if drawn:
        drawn_requests = [requests[row] for row in drawn]
        rows = torch.tensor(drawn, device=logits_BV.device)
        probabilities_BV = truncated_probabilities(logits_BV[rows].float(), drawn_requests)
        exponential_BV = torch.empty_like(probabilities_BV)
        for row, exponential_V in zip(drawn, exponential_BV, strict=True):
            exponential_V.exponential_(generator=generators[row])
        next_B[rows] = (probabilities_BV / exponential_BV).argmax(dim=-1)
    return next_B


def truncated_probabilities(logits_BV: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Softmax at each row's temperature, truncated to its top_p nucleus, unnormalised."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=logits_BV.device, dtype=logits_BV.dtype)[:, None]

    probabilities_BV = (logits_BV / column([request.temperature for request in requests])).softmax(dim=-1)
    if all(request.top_p >= 1 for request in requests):
        return probabilities_BV
    sorted_BV, order_BV = probabilities_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    nucleus_B1 = column([request.top_p for request in requests])
    sorted_BV = sorted_BV.masked_fill((before_BV >= nucleus_B1) & (before_BV > 0), 0.0)
    return torch.zeros_like(sorted_BV).scatter(-1, order_BV, sorted_BV)
