"""Which of a step's candidates are kept: greedy acceptance, and the paper's typical acceptance (2.3.1).

A rule works on the tree's rows, not on padded lists of candidates: a row is accepted when its own token and those of
all rows above it pass. There is no slot without a token, so none can be accepted by accident (token id 0 included).
The deepest accepted row wins; the root's token was the target's own choice and is always accepted.

Letters: N rows (the root and the nodes), V vocabulary; leading dimensions, shown as …, pass through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from pipeline.medusa.tree import Tree


class Verdict(NamedTuple):
    """The deepest accepted row and the target's token after it, both int64 [...]."""

    row: Tensor
    next_token: Tensor


class AcceptanceRule(Protocol):
    """Judges the tree's tokens [..., N] by the target's logits [..., N, V] at its rows."""

    def __call__(self, logits_NV: Tensor, tokens_N: Tensor, tree: Tree) -> Verdict: ...


def greedy_acceptance(logits_NV: Tensor, tokens_N: Tensor, tree: Tree) -> Verdict:
    """Keeps what greedy decoding of the target would have written, token for token."""
    best_N = logits_NV.argmax(-1)
    passes_N = tokens_N == best_N[..., tree.parent]
    row = (_accepted(passes_N, tree) * tree.depth).argmax(-1)
    return Verdict(row, _take(best_N, row))


@dataclass(frozen=True)
class TypicalAcceptance:
    """Keeps a token when p > min(eps, delta · exp(-H)); p and its entropy H are taken after `temperature` (2.3.1).

    Of equally long candidates the likeliest wins; the token after it is the target's greedy choice, so that the
    output is deterministic at every temperature. The paper sets eps = 0.09 and delta = sqrt(eps). Temperature must be
    above 0.
    """

    temperature: float
    eps: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError("typical acceptance needs a temperature above 0; its limit at 0 is greedy acceptance")

    def __call__(self, logits_NV: Tensor, tokens_N: Tensor, tree: Tree) -> Verdict:
        exact = torch.promote_types(logits_NV.dtype, torch.float32)
        log_p_NV = torch.log_softmax(logits_NV.to(exact) / self.temperature, -1)
        entropy_N = torch.special.entr(log_p_NV.exp()).sum(-1)
        threshold_N = (self.delta * torch.exp(-entropy_N)).clamp(max=self.eps)
        log_p_N = log_p_NV[..., tree.parent, :].gather(-1, tokens_N[..., None])[..., 0]
        accepted_N = _accepted(log_p_N.exp() > threshold_N[..., tree.parent], tree)

        lengths_N = accepted_N * tree.depth
        ties_N = accepted_N & (lengths_N == lengths_N.amax(-1, keepdim=True))
        above = tree.ancestors & (tree.depth > 0)  # without the root, whose token is no candidate
        likelihood_N = torch.where(above, log_p_N[..., None, :], 0.0).sum(-1)
        row = likelihood_N.masked_fill(~ties_N, -torch.inf).argmax(-1)
        return Verdict(row, _take(logits_NV.argmax(-1), row))


def acceptance_rule(
    name: Literal["greedy", "typical"], temperature: float = 0.0, eps: float = 0.09, delta: float = 0.3
) -> AcceptanceRule:
    """The rule of that name; at temperature 0 typical acceptance is greedy acceptance."""
    return TypicalAcceptance(temperature, eps, delta) if name == "typical" and temperature > 0 else greedy_acceptance


def _accepted(passes_N: Tensor, tree: Tree) -> Tensor:
    """Rows that pass together with all rows above them; the root passes always."""
    passes_N = passes_N | (tree.depth == 0)
    return (passes_N[..., None, :] | ~tree.ancestors).all(-1)


def _take(values_N: Tensor, row: Tensor) -> Tensor:
    return values_N.gather(-1, row[..., None])[..., 0]
