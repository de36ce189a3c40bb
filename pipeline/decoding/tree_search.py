"""Search candidate trees on the ranks of held-out tokens among the heads' guesses.

Ranks determine the heads' accuracies (paper 2.3.3), how often whole paths are right and, by a
replay of the held-out text, the acceleration rate of any tree on it. Rates are cross-validated: the
trees found on each half of the conversations are replayed on the other half, and the estimate is
over both replays.

Letters: N positions, K heads, R ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.decoding.held_out import HeldOutRanks, Replay, replay
from pipeline.decoding.tree import TreePath
from pipeline.heads.accuracy import NO_LABEL

SAME_SPEED = 0.05  # timing noise: relative difference between two timings of the same tree

Choice = TypeVar("Choice", bound=Hashable)


def rank_accuracies(
    hits_KR: npt.NDArray[np.int64], counts_K: npt.NDArray[np.int64]
) -> list[list[float]]:
    """Compute the accuracy a_k(i) of head k's i-th guess, as K lists of R (paper 2.3.3).

    `hits_KR` is how often each guess is right, and `counts_K` the number of each head's labels. The
    accuracies of a head without labels are 0.
    """
    return (hits_KR / np.maximum(counts_K, 1)[:, None]).tolist()


def joint_tree(
    ranks: HeldOutRanks, num_nodes: int, max_depth: int | None = None
) -> tuple[TreePath, ...]:
    """Search the candidate tree of `num_nodes` nodes whose paths were right most often.

    The heads' errors are correlated, so the product of accuracies underrates paths whose first
    guess is right. The search repeatedly adds the child path that was right most often. No path is
    right more often than its parent, so the result is optimal, and its first n nodes are the best
    tree of n nodes. Paths that were never right are left out, so there may be fewer nodes. If none
    was right, the tree is the best guess of the first head.
    """
    depth_limit = min(len(ranks.ranks_KN), max_depth or len(ranks.ranks_KN))
    chosen: list[TreePath] = []
    everywhere = np.arange(len(ranks))
    frontier: list[tuple[int, int, TreePath, npt.NDArray[np.int64]]] = []
    heapq.heappush(frontier, (-len(ranks), 0, (), everywhere))
    while frontier and len(chosen) <= num_nodes:
        _, depth, path, places = heapq.heappop(frontier)
        chosen.append(path)
        if depth < depth_limit:
            ranks_N = ranks.ranks_KN[depth, places]
            counts = np.bincount(ranks_N, minlength=256)[:NO_LABEL]
            for rank in np.flatnonzero(counts).tolist():
                entry = (-int(counts[rank]), depth + 1, (*path, rank), places[ranks_N == rank])
                heapq.heappush(frontier, entry)
    return tuple(chosen[1:]) or ((0,),)  # without the root


class CrossFit:
    """The tree searched on all held-out text, with rates cross-validated on its two halves.

    A tree is also searched on each half of the conversations and replayed on the other half. It is
    cut at the depth of the tree of all text, so that a step accepts no more tokens than it could
    with that tree.
    """

    def __init__(self, ranks: HeldOutRanks, num_nodes: int, max_depth: int | None):
        self.ranks = ranks
        self.whole = joint_tree(ranks, num_nodes, max_depth)
        self._halves = ranks.conversation_halves()
        self._searched = [joint_tree(half, num_nodes, max_depth) for half in self._halves]

    def replay(self, size: int) -> Replay:
        """Replay decoding of each half with the tree found on the other half; join the replays.

        The trees have at most `size` nodes.
        """
        first, second = self._halves
        return replay(second, self.half_tree(0, size)) + replay(first, self.half_tree(1, size))

    def half_tree(self, half: int, size: int) -> tuple[TreePath, ...]:
        """Return the tree that was searched on one half (0 or 1), to replay on the other.

        It has at most `size` nodes, and is cut at the depth of the tree of all text.
        """
        depth = max(map(len, self.whole[:size]))
        return tuple(path for path in self._searched[half][:size] if len(path) <= depth)


def fastest_choice(rates: Mapping[Choice, float], overheads: Mapping[Choice, float]) -> Choice:
    """Choose the candidate tree or chain with the highest speedup: rate divided by overhead.

    Among choices within timing noise (`SAME_SPEED`) of the fastest one, the highest product of
    speedup and rate decides, because the rate has no timing noise. A choice whose overhead is NaN
    is returned only if all are NaN.
    """
    speeds = {choice: rate / overheads[choice] for choice, rate in rates.items()}
    best = max(filter(np.isfinite, speeds.values()), default=0.0)
    as_fast = [choice for choice in rates if speeds[choice] >= (1 - SAME_SPEED) * best]
    return max(as_fast or rates, key=lambda choice: speeds[choice] * rates[choice])
