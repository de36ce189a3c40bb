"""Expected acceleration rates of trees: replay decoding of held-out text without running a model.

The rank of a held-out token is its index among a head's guesses: 0 if the first guess is right, 1
if the second is. Greedy decoding writes the same text with any tree, so the ranks determine its
steps with a static tree. For dynamic trees the rank is instead the index of the token's node among
all nodes that the heads propose in the step.

An acceleration rate is a ratio of sums, tokens over steps. The steps of one conversation are
correlated, so the standard error is a bootstrap over conversations, not over steps (Efron and
Tibshirani, An Introduction to the Bootstrap, chapters 6 and 8).

Letters: N positions of all spans, concatenated, K heads, R ranks, S steps, C conversations,
B resamples.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.decoding.tree import Choices, TreePath
from pipeline.heads.accuracy import NO_LABEL

NUM_RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """An estimated acceleration rate (tokens per step) with its standard error.

    The rate is NaN without steps; the standard error is NaN with fewer than two conversations.
    """

    rate: float
    standard_error: float


def rate_of_answers(
    accepted: Sequence[Sequence[int]], conversations: Sequence[Hashable]
) -> Estimate:
    """Estimate the acceleration rate of decoded answers, with a bootstrap standard error.

    Args:
        accepted: Per answer, the number of tokens that each forward pass after the prefill adds,
            without tokens after the end of the text.
        conversations: Per answer, the key of its conversation.
    """
    tokens: Counter[Hashable] = Counter()
    steps: Counter[Hashable] = Counter()
    for kept, conversation in zip(accepted, conversations, strict=True):
        tokens[conversation] += sum(kept)
        steps[conversation] += len(kept)
    return bootstrap_rate(list(tokens.values()), list(steps.values()))


def bootstrap_rate(tokens_C: npt.ArrayLike, steps_C: npt.ArrayLike) -> Estimate:
    """Estimate the acceleration rate from the tokens and steps of each conversation.

    The standard error is a bootstrap over conversations. The standard deviation of the resamples
    is too small by a factor sqrt((C-1)/C), which is corrected. Conversations without a step are
    ignored. The same seed gives the same estimate.
    """
    tokens_C = np.asarray(tokens_C, np.float64)
    steps_C = np.asarray(steps_C, np.float64)
    tokens_C = tokens_C[steps_C > 0]
    steps_C = steps_C[steps_C > 0]
    num = len(steps_C)
    if num == 0:
        return Estimate(math.nan, math.nan)
    rate = float(tokens_C.sum() / steps_C.sum())
    if num == 1:
        return Estimate(rate, math.nan)
    times_BC = np.random.default_rng(0).multinomial(num, np.full(num, 1 / num), NUM_RESAMPLES)
    rates_B = (times_BC @ tokens_C) / (times_BC @ steps_C)
    return Estimate(rate, float(rates_B.std() * math.sqrt(num / (num - 1))))


@dataclass(frozen=True)
class HeldOutRanks:
    """Ranks of held-out tokens, to replay decoding with static or dynamic trees.

    Attributes:
        ranks_KN: For each position t, the ranks of the tokens at t+2+k: for static trees uint8,
            from `label_ranks`; for dynamic trees int16, from `DynamicTree.places`.
        starts: The first position of each span, ascending from 0.
        conversations: The number of each span's conversation.
        seen: Whether each span is an answer that is also in a training row.
    """

    ranks_KN: npt.NDArray[np.uint8 | np.int16]
    starts: npt.NDArray[np.int64]
    conversations: npt.NDArray[np.int64]
    seen: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        """Return the number of held-out positions on which decoding is replayed."""
        return self.ranks_KN.shape[1]

    def conversation_halves(self) -> tuple[HeldOutRanks, HeldOutRanks]:
        """Split the ranks into two halves by conversation, for cross-validation.

        Conversations alternate between the halves. Alternating spans would put all first answers
        into one half if each conversation has two spans.
        """
        _, place = np.unique(self.conversations, return_inverse=True)
        return self._ranks_of_spans(place % 2 == 0), self._ranks_of_spans(place % 2 == 1)

    def _ranks_of_spans(self, chosen: npt.NDArray[np.bool_]) -> HeldOutRanks:
        """Return the ranks of the chosen spans."""
        lengths = np.diff(self.starts, append=len(self))
        kept = lengths[chosen]
        ranks_KN = self.ranks_KN[:, np.repeat(chosen, lengths)]
        starts = np.cumsum(kept) - kept
        return HeldOutRanks(ranks_KN, starts, self.conversations[chosen], self.seen[chosen])

    def guess_hits(self, top: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Count each head's right guesses by rank, [K, R], and its labels, [K].

        The ranks must be those of `label_ranks`.
        """
        hits_KR = np.stack([np.bincount(ranks_N, minlength=256)[:top] for ranks_N in self.ranks_KN])
        return hits_KR, (self.ranks_KN != NO_LABEL).sum(1)


@dataclass(frozen=True)
class Replay:
    """The steps of a replayed decoding; each adds its accepted guesses and one token of the target.

    Attributes:
        kept_S: The number of guesses that each step accepts.
        conversations_S: The conversation of each step.
        seen_S: Whether the step's answer is also in a training row.
    """

    kept_S: npt.NDArray[np.int64]
    conversations_S: npt.NDArray[np.int64]
    seen_S: npt.NDArray[np.bool_]

    @property
    def acceleration_rate(self) -> float:
        """The acceleration rate of the replay: tokens per step; NaN without steps."""
        return 1.0 + float(self.kept_S.mean()) if len(self.kept_S) else math.nan

    def estimate(self) -> Estimate:
        """Estimate the replayed acceleration rate, with a bootstrap over conversations."""
        _, owner_S = np.unique(self.conversations_S, return_inverse=True)
        return bootstrap_rate(np.bincount(owner_S, self.kept_S + 1), np.bincount(owner_S))

    def new_answers(self) -> Replay:
        """Return the steps in answers that are not also in training rows."""
        return Replay(*(column[~self.seen_S] for column in vars(self).values()))

    def __add__(self, other: Replay) -> Replay:
        """Concatenate the steps of two replays of different conversations."""
        columns = zip(vars(self).values(), vars(other).values(), strict=True)
        return Replay(*(np.concatenate(pair) for pair in columns))


def replay(ranks: HeldOutRanks, choices: Choices) -> Replay:
    """Replay greedy decoding of held-out text with a static candidate tree."""
    right: dict[TreePath, npt.NDArray[np.bool_]] = {(): np.ones(len(ranks), bool)}
    lengths_N = np.zeros(len(ranks), np.int64)
    for path in sorted(map(tuple, choices), key=len):
        depth = len(path) - 1
        right[path] = right[path[:-1]] & (ranks.ranks_KN[depth] == path[-1])
        lengths_N[right[path]] = depth + 1
    return _replay_lengths(ranks, lengths_N)


def replay_dynamic(places: HeldOutRanks, num_nodes: int) -> Replay:
    """Replay greedy decoding of held-out text with dynamic trees of `num_nodes` nodes.

    The ranks must be those of `DynamicTree.places`.
    """
    return _replay_lengths(places, (places.ranks_KN < num_nodes).cumprod(0).sum(0))


def _replay_lengths(text: HeldOutRanks, lengths_N: npt.NDArray[np.int64]) -> Replay:
    """Replay greedy decoding with a tree that accepts up to `lengths_N` guesses at each position.

    After a step that accepts n guesses, the next step starts n + 1 positions later. A span's first
    token comes from the prefill and is not counted; guesses beyond the span's end are cut.
    """
    stride = (lengths_N + 1).tolist()
    kept: list[int] = []
    num_steps = []
    for place, stop in itertools.pairwise([*text.starts.tolist(), len(stride)]):
        before = len(kept)
        while place < stop:
            kept.append(min(stride[place], stop - place) - 1)
            place += stride[place]
        num_steps.append(len(kept) - before)
    return Replay(
        np.array(kept, np.int64),
        np.repeat(text.conversations, num_steps),
        np.repeat(text.seen, num_steps),
    )
