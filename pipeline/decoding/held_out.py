"""Held-out text as ranks or places, and decoding's walk through it with any tree, without a
forward.

A rank is the place of the held-out token: 0 where a head's first guess is right, 1 where its second
is. Greedy decoding writes the same text with any tree, so ranks determine which steps it takes with
a static one. With a dynamic tree places do: where the token's node stands among all that are
proposed there.

Letters: N positions, end to end as the target wrote them, K heads, R ranks, S steps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.decoding.standard_error import Estimate, estimated_rate
from pipeline.decoding.tree import Choices, TreePath
from pipeline.heads.accuracy import NO_LABEL


@dataclass(frozen=True)
class HeldOutRanks:
    """Ranks uint8 [K, N] of the tokens at t+2+k, the first position of each span, and each span's
    conversation.

    `starts` ascend from 0; spans of one conversation are adjacent and have the same number in
    `conversations`. `seen` says of each span whether it is an answer that the target has also
    written in a training row.
    """

    ranks_KN: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    conversations: npt.NDArray[np.int64]
    seen: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return self.ranks_KN.shape[1]

    def halves(self) -> tuple[HeldOutRanks, HeldOutRanks]:
        """Every other conversation: each half judges the trees that were searched on the other.

        Not every other span: where each conversation has two, one half would hold first answers
        only.
        """
        _, place = np.unique(self.conversations, return_inverse=True)
        return self._of(place % 2 == 0), self._of(place % 2 == 1)

    def new(self) -> HeldOutRanks:
        """The spans that the target has not written in training rows."""
        return self._of(~self.seen)

    def _of(self, chosen: npt.NDArray[np.bool_]) -> HeldOutRanks:
        lengths = np.diff(self.starts, append=len(self))
        kept = lengths[chosen]
        ranks_KN = self.ranks_KN[:, np.repeat(chosen, lengths)]
        starts = np.cumsum(kept) - kept
        return HeldOutRanks(ranks_KN, starts, self.conversations[chosen], self.seen[chosen])

    def hits(self, top: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """How often each head's r-th guess is right, [K, R], and the number of labels, [K]."""
        hits_KR = np.stack([np.bincount(ranks_N, minlength=256)[:top] for ranks_N in self.ranks_KN])
        return hits_KR, (self.ranks_KN != NO_LABEL).sum(1)


@dataclass(frozen=True)
class HeldOutPlaces:
    """Places int16 [K, N] of the tokens at t+2+k, see `DynamicTree.places`; spans as of
    `HeldOutRanks`.
    """

    places_KN: npt.NDArray[np.int16]
    starts: npt.NDArray[np.int64]
    conversations: npt.NDArray[np.int64]
    seen: npt.NDArray[np.bool_]

    def walk(self, num_nodes: int) -> Walk:
        """Greedy decoding with a dynamic tree of so many nodes, had it written the held-out
        text.
        """
        lengths_N = (self.places_KN < num_nodes).cumprod(0).sum(0)
        return walk_by(lengths_N, self.starts, self.conversations, self.seen)


@dataclass(frozen=True)
class Walk:
    """The steps of decoding: where each begins, how many guesses it adds, whose conversation it is
    in, and whether its answer is one that the target has also written in a training row.

    A step adds its guesses and one token of the target's own.
    """

    places_S: npt.NDArray[np.int64]
    kept_S: npt.NDArray[np.int64]
    conversations_S: npt.NDArray[np.int64]
    seen_S: npt.NDArray[np.bool_]

    @property
    def acceleration_rate(self) -> float:
        """Tokens per step; NaN without steps."""
        return 1.0 + float(self.kept_S.mean()) if len(self.kept_S) else float("nan")

    def estimate(self) -> Estimate:
        """The acceleration rate and its standard error, by conversations."""
        _, owner_S = np.unique(self.conversations_S, return_inverse=True)
        return estimated_rate(np.bincount(owner_S, self.kept_S + 1), np.bincount(owner_S))

    def new(self) -> Walk:
        """The steps in answers that the target has not written in training rows."""
        new_S = ~self.seen_S
        return Walk(
            self.places_S[new_S],
            self.kept_S[new_S],
            self.conversations_S[new_S],
            self.seen_S[new_S],
        )

    def depth_shares(self) -> list[float]:
        """The share of steps that add at least 1, 2, … guesses: 1 and their sum are the
        acceleration rate.
        """
        return [
            float((self.kept_S >= depth).mean())
            for depth in range(1, int(self.kept_S.max(initial=0)) + 1)
        ]

    def node_shares(self, ranks: HeldOutRanks, choices: Choices) -> list[float]:
        """The share of steps that add each node of the tree that was walked with: again 1 and their
        sum are the rate.

        `ranks` are those that the walk went through.
        """
        shares = []
        for path in choices:
            reached = self.places_S[self.kept_S >= len(path)]
            right_S = np.equal(ranks.ranks_KN[: len(path), reached], np.array(path)[:, None]).all(0)
            shares.append(float(right_S.sum()) / max(1, len(self.places_S)))
        return shares

    def __add__(self, other: Walk) -> Walk:
        """The steps of both: walks through different conversations, as halves have them."""
        mine, others = vars(self).values(), vars(other).values()
        return Walk(*(np.concatenate(pair) for pair in zip(mine, others, strict=True)))


def walk(ranks: HeldOutRanks, choices: Choices) -> Walk:
    """Greedy decoding with the tree, had it written the held-out text.

    See `walk_by`.
    """
    return walk_by(accepted_lengths(ranks, choices), ranks.starts, ranks.conversations, ranks.seen)


def walk_by(
    lengths_N: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    conversations: npt.NDArray[np.int64],
    seen: npt.NDArray[np.bool_],
) -> Walk:
    """Greedy decoding, had it accepted so many guesses at each position; spans as of
    `HeldOutRanks`.

    After a step that accepts a guesses the next one starts a+1 positions on. A span's first token
    comes from the prefill and is not counted; what a step would add beyond the span's end is cut.
    Unlike an average over positions, the walk visits hard positions more often than easy ones, as
    decoding does.
    """
    stride = (lengths_N + 1).tolist()
    places: list[int] = []
    kept: list[int] = []
    num_steps: list[int] = []
    for place, stop in itertools.pairwise([*starts.tolist(), len(stride)]):
        before = len(places)
        while place < stop:
            places.append(place)
            kept.append(min(stride[place], stop - place) - 1)
            place += stride[place]
        num_steps.append(len(places) - before)
    repeats = np.array(num_steps, np.int64)
    return Walk(
        np.array(places, np.int64),
        np.array(kept, np.int64),
        np.repeat(conversations, repeats),
        np.repeat(seen, repeats),
    )


def simulated_acceleration_rate(ranks: HeldOutRanks, choices: Choices) -> float:
    """Tokens per forward of greedy decoding with the tree, had it written the held-out text; NaN
    without positions.
    """
    return walk(ranks, choices).acceleration_rate


def accepted_lengths(ranks: HeldOutRanks, choices: Choices) -> npt.NDArray[np.int64]:
    """The number of guesses [N] that greedy acceptance keeps at each position: the depth of the
    deepest right path.
    """
    right: dict[TreePath, npt.NDArray[np.bool_]] = {(): np.ones(len(ranks), bool)}
    lengths_N = np.zeros(len(ranks), np.int64)
    for path in sorted(map(tuple, choices), key=len):
        depth = len(path) - 1
        right[path] = right[path[:-1]] & (ranks.ranks_KN[depth] == path[-1])
        lengths_N[right[path]] = depth + 1
    return lengths_N
