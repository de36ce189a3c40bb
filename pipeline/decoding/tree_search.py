"""Searching for the best tree, from the ranks of held-out tokens among the heads' guesses.

A rank is the place of the held-out token: 0 where a head's first guess is right, 1 where its second is. Ranks determine
the heads' accuracies (paper 2.3.3), how often whole paths are right and, by a walk through the held-out text in the
steps of decoding, the acceleration rate of any tree on it, without a forward.

Letters: N positions, end to end as the target wrote them, K heads, R ranks.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.decoding.tree import Choices, TreePath, greedy_tree
from pipeline.heads.accuracy import NO_LABEL

MAX_RANKS = 254
SAME_SPEED = 0.05  # relative difference between two timings of the same tree


@dataclass(frozen=True)
class HeldOutRanks:
    """Ranks uint8 [K, N] of the tokens at t+2+k, the first position of each span, and each span's conversation.

    `starts` ascend from 0; spans of one conversation are adjacent and have the same number in `conversations`.
    """

    ranks_KN: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    conversations: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return self.ranks_KN.shape[1]

    def halves(self) -> tuple[HeldOutRanks, HeldOutRanks]:
        """Every other conversation: one half to search trees on, the other to choose between them.

        Not every other span: where each conversation has two, one half would hold first answers only.
        """
        lengths = np.diff(self.starts, append=len(self))
        _, place = np.unique(self.conversations, return_inverse=True)
        return self._of(lengths, place % 2 == 0), self._of(lengths, place % 2 == 1)

    def _of(self, lengths: npt.NDArray[np.int64], chosen: npt.NDArray[np.bool_]) -> HeldOutRanks:
        kept = lengths[chosen]
        ranks_KN = self.ranks_KN[:, np.repeat(chosen, lengths)]
        return HeldOutRanks(ranks_KN, np.cumsum(kept) - kept, self.conversations[chosen])

    def hits(self, top: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """How often each head's r-th guess is right, [K, R], and the number of labels, [K]."""
        hits_KR = np.stack([np.bincount(ranks_N, minlength=256)[:top] for ranks_N in self.ranks_KN])
        return hits_KR, (self.ranks_KN != NO_LABEL).sum(1)


def rank_accuracies(hits_KR: npt.NDArray[np.int64], counts_K: npt.NDArray[np.int64]) -> list[list[float]]:
    """a_k(i): the share of its labels that head k's i-th guess hits; 0 without labels (2.3.3)."""
    return (hits_KR / np.maximum(counts_K, 1)[:, None]).tolist()


def search_trees(
    ranks: HeldOutRanks, num_nodes: int, max_depth: int | None, top: int
) -> dict[str, tuple[TreePath, ...]]:
    """The trees of both searches, by the `product` of accuracies (2.3.3) and by `joint` frequencies, at least one node.

    The first n nodes of each are its best tree of n.
    """
    product = greedy_tree(rank_accuracies(*ranks.hits(top)), num_nodes, max_depth)
    joint, _ = joint_tree(ranks, num_nodes, max_depth)
    return {"product": product or ((0,),), "joint": joint or ((0,),)}


def choose_tree(
    trees: dict[str, tuple[TreePath, ...]], ranks: HeldOutRanks, sizes: Sequence[int], overheads: dict[int, float]
) -> tuple[str, int]:
    """The search and the number of nodes with the highest speedup on `ranks`, which the trees were not searched on.

    Speedup uses the overhead of each size; without overheads the acceleration rate decides. Among choices within
    timing noise of the fastest one, speedup times acceleration rate decides: the rate is counted, not timed, and is
    the same on every device.
    """
    choices = dict.fromkeys((name, min(size, len(tree))) for size in sizes for name, tree in trees.items())
    rates = {(name, size): simulated_acceleration_rate(ranks, trees[name][:size]) for name, size in choices}
    speeds = {
        (name, size): rate / (interpolated_overhead(overheads, size) if overheads else 1.0)
        for (name, size), rate in rates.items()
    }
    fastest = max(filter(np.isfinite, speeds.values()), default=0.0)  # an overhead is NaN where no step had room
    as_fast = [choice for choice in choices if speeds[choice] >= (1 - SAME_SPEED) * fastest] or list(choices)
    return max(as_fast, key=lambda choice: speeds[choice] * rates[choice])


def joint_tree(
    ranks: HeldOutRanks, num_nodes: int, max_depth: int | None = None
) -> tuple[tuple[TreePath, ...], list[float]]:
    """The tree of at most `num_nodes` nodes whose paths were right most often, and the frequency of each.

    The heads' errors are correlated, so the product of accuracies underrates paths that follow a right first guess. A
    path is right no more often than its parent, so adding the most frequent one is optimal and the first n nodes are
    the best tree of n. Paths that were never right are left out.
    """
    depth_limit = min(len(ranks.ranks_KN), max_depth or len(ranks.ranks_KN))
    chosen: list[TreePath] = []
    frequencies: list[float] = []
    everywhere = np.arange(len(ranks))
    frontier: list[tuple[int, int, TreePath, npt.NDArray[np.int64]]] = [(-len(ranks), 0, (), everywhere)]
    while frontier and len(chosen) <= num_nodes:
        negative, depth, path, places = heapq.heappop(frontier)
        chosen.append(path)
        frequencies.append(-negative / max(1, len(ranks)))
        if depth < depth_limit:
            ranks_N = ranks.ranks_KN[depth, places]
            counts = np.bincount(ranks_N, minlength=256)[:MAX_RANKS]
            for rank in np.flatnonzero(counts).tolist():
                heapq.heappush(frontier, (-int(counts[rank]), depth + 1, (*path, rank), places[ranks_N == rank]))
    return tuple(chosen[1:]), frequencies[1:]  # without the root


def path_frequencies(ranks: HeldOutRanks, choices: Choices) -> list[float]:
    """The share of all positions at which each path is right."""
    if not len(ranks):
        return [0.0 for _ in choices]
    right = (np.equal(ranks.ranks_KN[: len(path)], np.array(path)[:, None]).all(0) for path in choices)
    return [float(right_N.mean()) for right_N in right]


def accepted_lengths(ranks: HeldOutRanks, choices: Choices) -> npt.NDArray[np.int64]:
    """The number of guesses [N] that greedy acceptance keeps at each position: the depth of the deepest right path."""
    right: dict[TreePath, npt.NDArray[np.bool_]] = {(): np.ones(len(ranks), bool)}
    lengths_N = np.zeros(len(ranks), np.int64)
    for path in sorted(map(tuple, choices), key=len):
        depth = len(path) - 1
        right[path] = right[path[:-1]] & (ranks.ranks_KN[depth] == path[-1])
        lengths_N[right[path]] = depth + 1
    return lengths_N


def simulated_acceleration_rate(ranks: HeldOutRanks, choices: Choices) -> float:
    """Tokens per forward of greedy decoding with the tree, had it written the held-out text.

    After a step that keeps a guesses the next one starts a+1 positions on. A span's first token comes from the prefill
    and is not counted; what a step would keep beyond the span's end is cut. Unlike an average over positions, the walk
    visits hard positions more often than easy ones, as decoding does. NaN without positions.
    """
    stride = (accepted_lengths(ranks, choices) + 1).tolist()
    num_steps = 0
    for place, stop in itertools.pairwise([*ranks.starts.tolist(), len(ranks)]):
        while place < stop:
            place += stride[place]
            num_steps += 1
    return len(ranks) / num_steps if num_steps else float("nan")


def interpolated_overhead(measured: dict[int, float], num_nodes: int) -> float:
    """The overhead of a tree of `num_nodes`, between the sizes at which it was measured."""
    sizes = sorted(measured)
    return float(np.interp(num_nodes, sizes, [measured[size] for size in sizes]))
