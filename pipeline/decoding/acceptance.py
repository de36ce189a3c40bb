"""Acceptance rules: choose the accepted path of a candidate tree and the token that follows it.

    greedy     accepts the target's most probable tokens; gives the text of greedy decoding
    typical    accepts tokens above a threshold that depends on the target's entropy (paper 2.3.1);
               the fastest rule, but it changes the distribution
    rejection  accepts the tokens that sampling from the target draws; keeps the target's
               distribution exactly

A rule works on the tree's rows, not on padded lists of candidates: a row is accepted if its token
and the tokens of all its ancestors pass. Every row has a token, so padding is never accepted. The
deepest accepted row wins; the root's token was chosen in the previous step and is always accepted.

A token is sampled as argmax(z / temperature + g) over the logits z, where g = -log(-log u) with
uniform u: the Gumbel-max form of softmax sampling. The noise g belongs to a position of the text,
not to a step: a step over several positions uses the noise of each position, and the next step
reuses the noise after the last accepted token. So a seed gives the same text with every tree, up to
rounding.

The nucleus at top_p is the smallest set of most probable tokens with at least that probability
(Holtzman et al., arXiv 1904.09751), as in transformers and vLLM: a token belongs to it when the
tokens ahead of it (more probable, or equally probable with a lower id) have less than top_p
together. The most probable token always belongs.

Letters: N rows (the root and the nodes), T positions (the root's children first), V vocabulary;
leading dimensions, shown as …, pass through.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pipeline.decoding.tree import TreeRows

RuleName = Literal["greedy", "typical", "rejection"]


class Noise:
    """Gumbel noise for sampling one text's next positions, drawn from the text's own generator.

    Each position takes V numbers from the generator, in the order of the text. The numbers are
    float64, because the 2^-24 resolution of float32 would bias rare tokens of a large vocabulary. A
    generator on the target's device avoids a copy per token.
    """

    def __init__(self, generator: torch.Generator | None):
        self._generator = generator
        self._waiting: list[Tensor] = []

    def next_noise(self, num_positions: int, logits_NV: Tensor) -> Tensor | None:
        """Return the Gumbel noise [T, V] of the next positions to decode; None without a generator.

        The noise is in the logits' dtype, at least float32. It is returned again by the next call
        unless `discard` is called.
        """
        if self._generator is None:
            return None
        size = logits_NV.shape[-1:]
        device = self._generator.device
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        while len(self._waiting) < num_positions:
            uniform_V = torch.rand(
                size, generator=self._generator, dtype=torch.float64, device=device
            )
            exponential_V = uniform_V.log_().neg_().to(logits_NV.device, dtype)
            self._waiting.append(exponential_V.log_().neg_())
        return torch.stack(self._waiting[:num_positions])

    def discard(self, num_tokens: int) -> None:
        """Discard the noise of the next `num_tokens` positions, which have now been decoded."""
        del self._waiting[:num_tokens]


def sample_tokens(
    logits_V: Tensor, noise_V: Tensor, temperature: float, top_p: float = 1.0
) -> Tensor:
    """Sample tokens [...] from the nucleus of softmax(logits [..., V] / temperature).

    The Gumbel noise [..., V] determines the result.
    """
    scaled_V = _upcast(logits_V) / temperature
    if top_p < 1:
        scaled_V = scaled_V.masked_fill(~nucleus_mask(scaled_V, top_p), -torch.inf)
    return (scaled_V + noise_V).argmax(-1)


def nucleus_mask(logits_V: Tensor, top_p: float) -> Tensor:
    """Return the mask [..., V] of the tokens in the top-p nucleus of softmax(logits [..., V])."""
    p_V, ids_V = logits_V.softmax(-1).sort(dim=-1, descending=True, stable=True)
    ahead_V = p_V.cumsum(-1) - p_V
    return torch.empty_like(p_V, dtype=torch.bool).scatter_(-1, ids_V, ahead_V < top_p)


class Acceptance(NamedTuple):
    """The deepest accepted tree row and the token that follows it, both int64 [...]."""

    row: Tensor
    next_token: Tensor


@dataclass(frozen=True)
class GreedyAcceptance:
    """Greedy acceptance: keep the tokens that greedy decoding of the target would write."""

    samples = False

    def choose(self, logits_V: Tensor, noise_V: Tensor | None = None) -> Tensor:
        """Choose the target's most probable tokens [...] for logits [..., V], without a tree."""
        return logits_V.argmax(-1)

    def accept(
        self, logits_NV: Tensor, tokens_N: Tensor, tree: TreeRows, noise_TV: Tensor | None = None
    ) -> Acceptance:
        """Accept the longest candidate path of the target's most probable tokens.

        Shapes: logits [..., N, V], tokens [..., N], noise [..., max_depth + 1, V]. Greedy
        acceptance ignores the noise.
        """
        best_N = logits_NV.argmax(-1)
        passes_N = tokens_N == _at_parents(best_N, tree)
        row = (_accepted_rows(passes_N, tree) * tree.depth).argmax(-1)
        return Acceptance(row, best_N.gather(-1, row[..., None])[..., 0])


greedy_acceptance = GreedyAcceptance()


@dataclass(frozen=True)
class TypicalAcceptance:
    """Typical acceptance: keep tokens with p > min(eps, delta · exp(-H(p))) (paper 2.3.1).

    The distribution p is the target's at `temperature`, and H its entropy in nats. Among equally
    long paths the most probable wins. The token after the accepted path is the target's most
    probable token. The paper sets eps = 0.09.
    """

    temperature: float
    eps: float = 0.09
    samples = False

    @property
    def delta(self) -> float:
        """The paper's choice for `eps`: its square root."""
        return sqrt(self.eps)

    def choose(self, logits_V: Tensor, noise_V: Tensor | None = None) -> Tensor:
        """Choose the most probable tokens [...] for logits [..., V]."""
        return logits_V.argmax(-1)

    def accept(
        self, logits_NV: Tensor, tokens_N: Tensor, tree: TreeRows, noise_TV: Tensor | None = None
    ) -> Acceptance:
        """Accept the longest candidate path of tokens above the rule's threshold.

        Shapes are those of `GreedyAcceptance.accept`.
        """
        log_p_NV = torch.log_softmax(_upcast(logits_NV) / self.temperature, -1)
        finite_NV = log_p_NV.clamp(min=torch.finfo(log_p_NV.dtype).min)  # 0 · log 0 is 0
        # Three times faster on a CPU than torch.special.entr.
        entropy_N = -torch.linalg.vecdot(log_p_NV.exp(), finite_NV)
        threshold_N = (self.delta * torch.exp(-entropy_N)).clamp(max=self.eps)
        at_tokens_N = tree.parent * logits_NV.shape[-1] + tokens_N
        log_p_N = log_p_NV.flatten(-2).gather(-1, at_tokens_N)
        accepted_N = _accepted_rows(log_p_N.exp() > _at_parents(threshold_N, tree), tree)

        lengths_N = accepted_N * tree.depth
        is_longest_N = accepted_N & (lengths_N == lengths_N.amax(-1, keepdim=True))
        likelihood_N = torch.where(tree.elsewhere, 0.0, log_p_N[..., None, :]).sum(-1)
        row = likelihood_N.masked_fill(~is_longest_N, -torch.inf).argmax(-1)
        return Acceptance(row, self.choose(_values_at_row(logits_NV, row)))


@dataclass(frozen=True)
class RejectionSampling:
    """Rejection sampling: keep exactly the target's distribution at `temperature` and `top_p`.

    Candidates are deterministic proposals. The textbook procedure tries the children of a node in
    order. It accepts a child with the child's probability p, otherwise sets this p to 0,
    renormalizes and tries the next child; after the last child it samples from the remaining
    distribution. Child i is then accepted with probability (1 - p_1 - … - p_{i-1}) · p_i /
    (1 - p_1 - … - p_{i-1}) = p_i, and every other token is sampled with its own p.

    This class instead draws one token from p and follows the child with that token, if there is
    one: the same distribution with one draw per position.
    """

    temperature: float
    top_p: float = 1.0
    samples = True

    def choose(self, logits_V: Tensor, noise_V: Tensor | None = None) -> Tensor:
        """Sample tokens [...] from the target's distributions, given as logits [..., V]."""
        assert noise_V is not None
        return sample_tokens(logits_V, noise_V, self.temperature, self.top_p)

    def accept(
        self, logits_NV: Tensor, tokens_N: Tensor, tree: TreeRows, noise_TV: Tensor | None = None
    ) -> Acceptance:
        """Sample one token after another while it is in the tree; accept the path of these tokens.

        Shapes are those of `GreedyAcceptance.accept`.
        """
        assert noise_TV is not None
        row = torch.zeros_like(tokens_N[..., 0])
        token = row
        is_open = torch.ones_like(row, dtype=torch.bool)
        for depth in range(tree.max_depth + 1):  # samples only on the path, not for all N rows
            drawn = self.choose(_values_at_row(logits_NV, row), noise_TV[..., depth, :])
            token = torch.where(is_open, drawn, token)
            is_child_N = (tree.parent == row[..., None]) & (tree.depth > 0)
            follows_N = is_child_N & (tokens_N == token[..., None])
            is_open = follows_N.any(-1)
            row = torch.where(is_open, follows_N.long().argmax(-1), row)
        return Acceptance(row, token)


AcceptanceRule = GreedyAcceptance | TypicalAcceptance | RejectionSampling


def acceptance_rule(
    name: RuleName,
    temperature: float = 0.0,
    eps: float = 0.09,
    top_p: float = 1.0,
) -> AcceptanceRule:
    """Build an acceptance rule by name; at temperature 0 every rule is greedy acceptance.

    Typical acceptance reads `eps`, rejection sampling `top_p`.
    Raises ValueError if `temperature` or `top_p` is out of range.
    """
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError("temperature is at least 0, top_p a probability above 0")
    if name == "greedy" or temperature == 0:
        return greedy_acceptance
    if name == "typical":
        return TypicalAcceptance(temperature, eps)
    return RejectionSampling(temperature, top_p)


def _upcast(logits_V: Tensor) -> Tensor:
    """Cast logits to float32, or leave them in float64; half precision is too coarse."""
    return logits_V.to(torch.promote_types(logits_V.dtype, torch.float32))


def _accepted_rows(passes_N: Tensor, tree: TreeRows) -> Tensor:
    """Return the mask [..., N] of the accepted tree rows, which pass with all their ancestors.

    The root is always accepted.
    """
    return (passes_N[..., None, :] | tree.elsewhere).all(-1)


def _at_parents(values_N: Tensor, tree: TreeRows) -> Tensor:
    """Return the value [..., N] of each tree row's parent."""
    return values_N.gather(-1, tree.parent.expand_as(values_N))


def _values_at_row(values_NV: Tensor, row: Tensor) -> Tensor:
    """Return the vectors [..., V] of one tree row per text, `row`, from values [..., N, V]."""
    index = row[..., None, None].expand(*row.shape, 1, values_NV.shape[-1])
    return values_NV.gather(-2, index)[..., 0, :]
