"""Which tree native decoding uses, and how many tokens the chain drafts that vLLM serves: by
expected speedup.

Rates are counted on held-out text, overheads timed on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from pipeline.artifacts.seen_answers import ENOUGH_NEW
from pipeline.artifacts.tree_file import Figures, Search
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import Estimate, HeldOutPlaces, HeldOutRanks, Walk, walk
from pipeline.decoding.tree import STOCK_NODES, TreePath, cartesian_tree
from pipeline.decoding.tree_search import CrossFit, fastest
from pipeline.evaluation.speed import rounded

Overheads = Mapping[int, float]  # by nodes; empty where nothing was timed


@dataclass(frozen=True)
class ChosenTree:
    """A tree, where it is from, the walk that judges it, and the share of steps that adds each of
    its nodes.

    Where it is `dynamic`, the walk is its own, and all else is of a static tree of the same size.
    """

    source: str
    choices: tuple[TreePath, ...]
    node_shares: list[float]
    walked: Walk
    search: Search | None = None
    dynamic: DynamicTree | None = None

    @property
    def num_nodes(self) -> int:
        return self.dynamic.num_nodes if self.dynamic else len(self.choices)

    @property
    def depth(self) -> int:
        return self.dynamic.max_depth if self.dynamic else max(map(len, self.choices))

    def tokens_by_depth(self) -> list[float]:
        """What each depth adds to a step; 1 and their sum are the expected rate."""
        added = self.walked.depth_shares()
        return [round(tokens, 4) for tokens in added + [0.0] * (self.depth - len(added))]


def given_tree(ranks: HeldOutRanks, choices: tuple[TreePath, ...]) -> ChosenTree:
    """A tree of the user's own, which all held-out text judges."""
    walked = walk(ranks, choices)
    return ChosenTree("calibrate.choices", choices, walked.node_shares(ranks, choices), walked)


def best_tree(fits: CrossFit, num_nodes: int, overheads: Overheads) -> ChosenTree:
    """The search and the number of nodes with the highest speedup; without overheads `num_nodes`,
    or all there are.
    """
    sizes = sorted(overheads) or [
        num_nodes
    ]  # costs jump between sizes, so they are not interpolated
    costs: dict[tuple[str, int], float] = {}
    for name, tree in fits.whole.items():
        for size in sizes:  # a tree that ends before has the overhead of the next size
            costs.setdefault((name, min(size, len(tree))), overheads.get(size, 1.0))
    rates = {choice: fits.walk(*choice).acceleration_rate for choice in costs}
    source, size = fastest(rates, costs)
    search = Search(
        {
            name: fits.walk(name, min(size, len(tree))).acceleration_rate
            for name, tree in fits.whole.items()
        },
        [
            {"nodes": timed} | promise(fits.estimate(source, timed), overheads[timed])
            for timed in sorted(overheads)
        ],
        judged=[fits.judged(half, source, size) for half in (0, 1)],
        searched=fits.whole[source][:STOCK_NODES],
    )
    choices = fits.whole[source][:size]
    return ChosenTree(
        source, choices, fits.node_shares(source, size), fits.walk(source, size), search
    )


def best_dynamic_tree(
    tree: DynamicTree, places: HeldOutPlaces, fits: CrossFit, overheads: Overheads
) -> ChosenTree:
    """The tree in the size with the highest speedup; without overheads as it is.

    Nothing is fitted on held-out text, so all of it judges every size. Beside it the best static
    tree of that size.
    """
    walks = {size: places.walk(size) for size in sorted(overheads) or [tree.num_nodes]}
    size = fastest(
        {size: walked.acceleration_rate for size, walked in walks.items()},
        overheads or {tree.num_nodes: 1},
    )
    static = best_tree(fits, size, {})
    assert static.search is not None
    sizes = [
        {"nodes": timed} | promise(walks[timed].estimate(), overheads[timed])
        for timed in sorted(overheads)
    ]
    search = replace(static.search, sizes=sizes)
    return replace(static, walked=walks[size], search=search, dynamic=tree.resized(size))


def chains(most: int) -> dict[int, tuple[TreePath, ...]]:
    """The chain of first guesses of each length."""
    return {num_tokens: cartesian_tree([1] * num_tokens) for num_tokens in range(1, most + 1)}


def chosen_chain(
    ranks: HeldOutRanks, most: int, default: int, overheads: Overheads
) -> tuple[int, list[Figures]]:
    """How many tokens to draft, and the figures of each number up to `most`; without overheads
    `default`.
    """
    walks = {num_tokens: walk(ranks, chain) for num_tokens, chain in chains(most).items()}
    timed = {num_tokens: cost for num_tokens, cost in overheads.items() if np.isfinite(cost)}
    num_tokens = default
    if timed:
        num_tokens = fastest({number: walks[number].acceleration_rate for number in timed}, timed)
    figures: list[Figures] = []
    for number, walked in walks.items():
        row: Figures = {"draft_tokens": number}
        row |= promise(walked.estimate(), timed.get(number))
        row["new"] = promise_on_new(ranks, walked)
        figures.append(row)
    return num_tokens, figures


def promise_on_new(text: HeldOutRanks | HeldOutPlaces, walked: Walk) -> Figures:
    """The expected rate on answers that the target has not written in training rows, and their
    number.

    Fewer than `ENOUGH_NEW` answers have no rate.
    """
    num_new = int((~text.seen).sum())
    if num_new < ENOUGH_NEW:
        return {"answers": num_new}
    return {"answers": num_new, **promise(walked.new().estimate())}


def promise(expected: Estimate, overhead: float | None = None) -> Figures:
    """The expected rate and its standard error; where the overhead was timed, that and the expected
    speedup.
    """
    figures = {
        "expected_acceleration_rate": expected.rate,
        "expected_standard_error": expected.standard_error,
    }
    if overhead is not None:
        figures = {"overhead": overhead, **figures, "expected_speedup": expected.rate / overhead}
    return {name: rounded(figure) for name, figure in figures.items()}
