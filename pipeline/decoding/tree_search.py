"""Searching the tree that makes the most of the heads' guesses, on the ranks that held-out tokens have among them.

A rank says how a held-out token would have been found: 0 where a head's first guess is right, 1 where its second is.
From ranks alone follow the heads' accuracies (paper 2.3.3), how often whole paths are right, and, walking through the
held-out text as decoding would, the acceleration rate that a tree would have had on it, with no forward at all.

Letters: N positions, end to end as the target wrote them, K heads, R ranks.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.decoding.tree import Path, greedy_tree
from pipeline.heads.accuracy import NO_LABEL

MAX_RANKS = 254
SAME_SPEED = 0.05  # what timing the same tree twice may differ by, relatively


@dataclass(frozen=True)
class HeldOutRanks:
    """Ranks uint8 [K, N] of the tokens at t+2+k, where the spans begin, and of which conversation each span is.

    `starts` ascend from 0; spans of one conversation stand together and have the same number in `conversations`.
    """

    ranks_KN: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    conversations: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return self.ranks_KN.shape[1]

    def halves(self) -> tuple[HeldOutRanks, HeldOutRanks]:
        """Every other conversation, so that what is searched on one half can be judged on the other.

        Not every other span: where all conversations have two, one half would be first answers, the other second ones.
        """
        lengths = np.diff(self.starts, append=len(self))
        _, place = np.unique(self.conversations, return_inverse=True)
        return self._of(lengths, place % 2 == 0), self._of(lengths, place % 2 == 1)

    def _of(self, lengths: npt.NDArray[np.int64], chosen: npt.NDArray[np.bool_]) -> HeldOutRanks:
        kept = lengths[chosen]
        starts = np.concatenate([[0], np.cumsum(kept)[:-1]]).astype(np.int64) if len(kept) else kept
        return HeldOutRanks(self.ranks_KN[:, np.repeat(chosen, lengths)], starts, self.conversations[chosen])

    def hits(self, top: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """How often each head's r-th guess alone is right, [K, R], and of how many labels, [K]."""
        hits_KR = np.stack([np.bincount(ranks_N, minlength=256)[:top] for ranks_N in self.ranks_KN])
        return hits_KR, (self.ranks_KN != NO_LABEL).sum(1)


def rank_accuracies(hits_KR: npt.NDArray[np.int64], counts_K: npt.NDArray[np.int64]) -> list[list[float]]:
    """a_k(i): the share of its labels that head k's i-th guess alone hits; 0 without labels (2.3.3)."""
    return (hits_KR / np.maximum(counts_K, 1)[:, None]).tolist()


def search_trees(ranks: HeldOutRanks, num_nodes: int, max_depth: int | None, top: int) -> dict[str, tuple[Path, ...]]:
    """The trees of both searches, by the `product` of accuracies (2.3.3) and by `joint` frequencies, at least one node.

    The first n nodes of each are its best tree of n.
    """
    product = greedy_tree(rank_accuracies(*ranks.hits(top)), num_nodes, max_depth)
    joint, _ = joint_tree(ranks, num_nodes, max_depth)
    return {"product": product or ((0,),), "joint": joint or ((0,),)}


def choose_tree(
    trees: dict[str, tuple[Path, ...]], ranks: HeldOutRanks, sizes: Sequence[int], overheads: dict[int, float]
) -> tuple[str, int]:
    """The search and the number of nodes that promise most on `ranks`, which the trees have not seen.

    The most is the highest speedup, by the overhead of each size; without overheads the highest acceleration rate.
    Among choices that timing cannot tell from the fastest one, speedup times acceleration rate decides: the rate is
    counted, not timed, and is the same on every device.
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
) -> tuple[tuple[Path, ...], list[float]]:
    """The tree of at most `num_nodes` nodes whose paths were right most often, and how often each was.

    Heads err together, so the product of their accuracies underrates the paths that follow a right first guess. A path
    is right no more often than its parent, so growing by the most frequent one is optimal, and the first n nodes are
    the best tree of n. Paths that were never right are left out.
    """
    depth_limit = min(len(ranks.ranks_KN), max_depth or len(ranks.ranks_KN))
    chosen: list[Path] = []
    frequencies: list[float] = []
    everywhere = np.arange(len(ranks))
    frontier: list[tuple[int, int, Path, npt.NDArray[np.int64]]] = [(-len(ranks), 0, (), everywhere)]
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


def path_frequencies(ranks: HeldOutRanks, choices: Sequence[Path]) -> list[float]:
    """How often each path is right, of all positions."""
    return [float(np.mean(_right(ranks, path))) if len(ranks) else 0.0 for path in choices]


def accepted_lengths(ranks: HeldOutRanks, choices: Iterable[Path]) -> npt.NDArray[np.int64]:
    """How many guesses [N] greedy acceptance would keep at each position: the depth of its deepest right path."""
    right: dict[Path, npt.NDArray[np.bool_]] = {(): np.ones(len(ranks), bool)}
    lengths_N = np.zeros(len(ranks), np.int64)
    for path in sorted(choices, key=len):
        depth = len(path) - 1
        right[path] = right[path[:-1]] & (ranks.ranks_KN[depth] == path[-1])
        lengths_N[right[path]] = depth + 1
    return lengths_N


def simulated_acceleration_rate(ranks: HeldOutRanks, choices: Iterable[Path]) -> float:
    """Tokens per forward that the tree would have had on the held-out text, walked through as greedy decoding does.

    After a step that kept a guesses the next one starts a+1 positions on. A span's first token comes from the prefill
    and is not counted; what a step would keep beyond its end is cut. Decoding visits hard positions more often than
    easy ones, which an average over all positions does not know. NaN without positions.
    """
    stride = (accepted_lengths(ranks, choices) + 1).tolist()
    num_steps = 0
    for place, stop in itertools.pairwise([*ranks.starts.tolist(), len(ranks)]):
        while place < stop:
            place += stride[place]
            num_steps += 1
    return len(ranks) / num_steps if num_steps else float("nan")


def _right(ranks: HeldOutRanks, path: Path) -> npt.NDArray[np.bool_]:
    return np.logical_and.reduce([ranks.ranks_KN[depth] == rank for depth, rank in enumerate(path)])


def interpolated_overhead(measured: dict[int, float], num_nodes: int) -> float:
    """The overhead of a tree of `num_nodes`, between the sizes at which it was measured."""
    sizes = sorted(measured)
    return float(np.interp(num_nodes, sizes, [measured[size] for size in sizes]))
