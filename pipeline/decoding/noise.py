"""Sampling from the target's distribution with noise per position, so that a seed gives one text
for every tree.

A token is sampled as argmax(z / temperature + g) over the logits z, where g = -log(-log u) with
uniform u: the Gumbel-max form of softmax sampling. The noise g belongs to a position of the text,
not to a step: a step that looks at several positions uses the noise of each, and noise beyond the
last kept token is used by the next step. The tree therefore changes the cost of a step, but neither
the distribution of the text nor, up to rounding, the text itself.

The nucleus at top_p is the smallest set of most probable tokens with at least that probability
(Holtzman et al., arXiv 1904.09751), as in transformers and vLLM: a token belongs to it when the
tokens ahead of it (more probable, or equally probable with a lower id) have less than top_p
together. The most probable token always belongs.

Letters: N rows, T positions, V vocabulary; leading dimensions, shown as …, pass through.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Noise:
    """The Gumbel noise of one text's next positions, from that text's own generator; None without a
    generator.

    Each position takes V numbers from the generator, in the order of the text. They are drawn in
    float64: the 2^-24 resolution of float32 would bias the rare tokens of a large vocabulary. A
    generator on the target's device avoids a copy per token.
    """

    def __init__(self, generator: torch.Generator | None):
        self._generator = generator
        self._waiting: list[Tensor] = []

    def ahead(self, num_positions: int, logits_NV: Tensor) -> Tensor | None:
        """The noise [T, V] of the next positions, on the logits' device and in their upcast
        dtype.
        """
        if self._generator is None:
            return None
        size, device = logits_NV.shape[-1:], self._generator.device
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        while len(self._waiting) < num_positions:
            uniform_V = torch.rand(
                size, generator=self._generator, dtype=torch.float64, device=device
            )
            exponential_V = uniform_V.log_().neg_().to(logits_NV.device, dtype)
            self._waiting.append(exponential_V.log_().neg_())
        return torch.stack(self._waiting[:num_positions])

    def advance(self, num_tokens: int) -> None:
        """Discard the noise of positions whose tokens are written."""
        del self._waiting[:num_tokens]


def draw(logits_V: Tensor, noise_V: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """Sample tokens [...] from the nucleus of softmax(logits [..., V] / temperature)."""
    scaled_V = upcast(logits_V) / temperature
    if top_p < 1:
        scaled_V = scaled_V.masked_fill(~nucleus(scaled_V, top_p), -torch.inf)
    return (scaled_V + noise_V).argmax(-1)


def nucleus(logits_V: Tensor, top_p: float) -> Tensor:
    """The tokens [..., V] of the nucleus of softmax(logits [..., V])."""
    p_V, ids_V = logits_V.softmax(-1).sort(dim=-1, descending=True, stable=True)
    ahead_V = p_V.cumsum(-1) - p_V
    return torch.empty_like(p_V, dtype=torch.bool).scatter_(-1, ids_V, ahead_V < top_p)


def upcast(logits_V: Tensor) -> Tensor:
    """Logits in at least float32: half precision is too coarse for probabilities."""
    return logits_V.to(torch.promote_types(logits_V.dtype, torch.float32))
