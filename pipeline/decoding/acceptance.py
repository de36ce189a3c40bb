"""Acceptance rules: which of a step's candidates are kept, and which token follows them.

    greedy     the target's most probable token: the text of greedy decoding
    typical    tokens probable enough for the target's entropy (paper 2.3.1): fastest, a different
    distribution rejection  the tokens that sampling from the target draws: exactly its distribution

A rule works on the tree's rows, not on padded lists of candidates: a row is accepted when its token
and the tokens of all rows above it pass. Every row has a token, so padding can never be accepted
(token id 0 included). The deepest accepted row wins; the root's token was chosen by the previous
step and is always accepted.

Letters: N rows (the root and the nodes), T positions (the root's children first), V vocabulary;
leading dimensions, shown as …, pass through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from pipeline.decoding.noise import draw, upcast

RuleName = Literal["greedy", "typical", "rejection"]


class Acceptance(NamedTuple):
    """The deepest accepted row and the token after it, both int64 [...]."""

    row: Tensor
    next_token: Tensor


class Rows(Protocol):
    """What a rule reads of a tree: one for all texts, or, of tensors with leading dimensions, one
    for each.

    `parent` and `depth` [..., N], `elsewhere` [..., N, N], as of `Tree`.
    """

    @property
    def parent(self) -> Tensor: ...
    @property
    def depth(self) -> Tensor: ...
    @property
    def elsewhere(self) -> Tensor: ...
    @property
    def max_depth(self) -> int: ...

    def depth_of(self, row: Tensor) -> Tensor: ...


class AcceptanceRule(Protocol):
    """A rule that `samples` is given noise (see noise.py), the others None."""

    @property
    def samples(self) -> bool: ...

    def choose(self, logits_V: Tensor, noise_V: Tensor | None = None) -> Tensor:
        """The next tokens [...] for logits [..., V], without candidates."""

    def accept(
        self, logits_NV: Tensor, tokens_N: Tensor, tree: Rows, noise_TV: Tensor | None = None
    ) -> Acceptance:
        """The longest path of the tokens [..., N] that passes; logits [..., N, V], noise [...,
        max_depth + 1, V].
        """


@dataclass(frozen=True)
class GreedyAcceptance:
    """Keeps the tokens that greedy decoding of the target writes."""

    samples = False

    def choose(self, logits_V: Tensor, noise_V: Tensor | None = None) -> Tensor:
        return logits_V.argmax(-1)

    def accept(
        self, logits_NV: Tensor, tokens_N: Tensor, tree: Rows, noise_TV: Tensor | None = None
    ) -> Acceptance:
        best_N = logits_NV.argmax(-1)
        passes_N = tokens_N == _at_parents(best_N, tree)
        row = (_accepted(passes_N, tree) * tree.depth).argmax(-1)
        return Acceptance(row, best_N.gather(-1, row[..., None])[..., 0])


greedy_acceptance = GreedyAcceptance()


@dataclass(frozen=True)
class TypicalAcceptance:
    """Keeps a token when p > min(eps, delta · exp(-H)); p and its entropy H are taken after
    `temperature` (2.3.1).

    Of equally long candidates the most probable wins. The token after it is the target's greedy
    choice as in the paper, so that the output is deterministic at every temperature, or, with
    `samples`, sampled from the target at that temperature. The paper sets eps = 0.09 and delta =
    sqrt(eps).
    """

    temperature: float
    eps: float = 0.09
    delta: float = 0.3
    samples: bool = False

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)

    def choose(self, logits_V: Tensor, noise_V: Tensor | None = None) -> Tensor:
        if not self.samples:
            return logits_V.argmax(-1)
        assert noise_V is not None
        return draw(logits_V, noise_V, self.temperature)

    def accept(
        self, logits_NV: Tensor, tokens_N: Tensor, tree: Rows, noise_TV: Tensor | None = None
    ) -> Acceptance:
        log_p_NV = torch.log_softmax(upcast(logits_NV) / self.temperature, -1)
        finite_NV = log_p_NV.clamp(min=torch.finfo(log_p_NV.dtype).min)  # 0 · log 0 is 0
        entropy_N = -torch.linalg.vecdot(
            log_p_NV.exp(), finite_NV
        )  # on a CPU in a third of the time of entr
        threshold_N = (self.delta * torch.exp(-entropy_N)).clamp(max=self.eps)
        log_p_N = _of_parents(log_p_NV, tokens_N, tree)
        row = _most_probable_of_longest(
            log_p_N.exp() > _at_parents(threshold_N, tree), log_p_N, tree
        )
        return Acceptance(row, _choose_after(self, row, logits_NV, tree, noise_TV))


@dataclass(frozen=True)
class RejectionSampling:
    """Keeps exactly the target's distribution after `temperature` and `top_p`.

    Candidates are deterministic proposals. Rejection sampling tries a row's children in order: it
    accepts a child with its probability p, otherwise sets that p to 0, renormalises and continues;
    when none is left it samples from the rest. Child i is then accepted with (1 - p_1 - … -
    p_{i-1}) · p_i / (1 - p_1 - … - p_{i-1}) = p_i, and any other token sampled with its p. Sampling
    one token from p and following the child that has it, if any, gives the same distribution with a
    single draw per position, and is what this rule does.
    """

    temperature: float
    top_p: float = 1.0
    samples = True

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is a probability above 0, not {self.top_p}")

    def choose(self, logits_V: Tensor, noise_V: Tensor | None = None) -> Tensor:
        assert noise_V is not None
        return draw(logits_V, noise_V, self.temperature, self.top_p)

    def accept(
        self, logits_NV: Tensor, tokens_N: Tensor, tree: Rows, noise_TV: Tensor | None = None
    ) -> Acceptance:
        assert noise_TV is not None
        row = torch.zeros_like(tokens_N[..., 0])
        token, is_open = row, torch.ones_like(row, dtype=torch.bool)
        for depth in range(tree.max_depth + 1):  # samples only on the path, not for all N rows
            drawn = self.choose(_at(logits_NV, row), noise_TV[..., depth, :])
            token = torch.where(is_open, drawn, token)
            follows_N = (
                (tree.parent == row[..., None]) & (tree.depth > 0) & (tokens_N == token[..., None])
            )
            is_open = follows_N.any(-1)
            row = torch.where(is_open, follows_N.long().argmax(-1), row)
        return Acceptance(row, token)


def acceptance_rule(
    name: RuleName,
    temperature: float = 0.0,
    eps: float = 0.09,
    delta: float = 0.3,
    top_p: float = 1.0,
    first_token: Literal["greedy", "sampled"] = "greedy",
) -> AcceptanceRule:
    """The rule of that name; at temperature 0 every rule is greedy acceptance.

    `eps`, `delta` and `first_token` belong to typical acceptance, `top_p` to rejection.
    ValueError when a number is out of range.
    """
    if name == "greedy" or temperature == 0:
        return greedy_acceptance
    if name == "typical":
        return TypicalAcceptance(temperature, eps, delta, samples=first_token == "sampled")
    return RejectionSampling(temperature, top_p)


def _accepted(passes_N: Tensor, tree: Rows) -> Tensor:
    """Rows that pass together with all rows above them; the root always passes."""
    return (passes_N[..., None, :] | tree.elsewhere).all(-1)


def _most_probable_of_longest(passes_N: Tensor, log_p_N: Tensor, tree: Rows) -> Tensor:
    accepted_N = _accepted(passes_N, tree)
    lengths_N = accepted_N * tree.depth
    ties_N = accepted_N & (lengths_N == lengths_N.amax(-1, keepdim=True))
    likelihood_N = torch.where(tree.elsewhere, 0.0, log_p_N[..., None, :]).sum(-1)
    return likelihood_N.masked_fill(~ties_N, -torch.inf).argmax(-1)


def _at_parents(values_N: Tensor, tree: Rows) -> Tensor:
    """Each row's parent's value."""
    return values_N.gather(-1, tree.parent.expand_as(values_N))


def _of_parents(values_NV: Tensor, tokens_N: Tensor, tree: Rows) -> Tensor:
    """The value [..., N] of each row's token in its parent's row."""
    return values_NV.flatten(-2).gather(-1, tree.parent * values_NV.shape[-1] + tokens_N)


def _choose_after(
    rule: AcceptanceRule, row: Tensor, logits_NV: Tensor, tree: Rows, noise_TV: Tensor | None
) -> Tensor:
    noise_V = None if noise_TV is None else _at(noise_TV, tree.depth_of(row))
    return rule.choose(_at(logits_NV, row), noise_V)


def _at(values_NV: Tensor, row: Tensor) -> Tensor:
    """The vector [..., V] of one row each."""
    index = row[..., None, None].expand(*row.shape, 1, values_NV.shape[-1])
    return values_NV.gather(-2, index)[..., 0, :]


def _check_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(
            "this rule needs a temperature above 0; its limit at 0 is greedy acceptance"
        )
