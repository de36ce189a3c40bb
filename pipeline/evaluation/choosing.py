"""Choose the tree of native decoding and the length of vLLM's chain by their expected speedup.

Rates are counted on held-out text, overheads are timed on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from pipeline.artifacts.json_form import rounded
from pipeline.artifacts.seen_answers import ENOUGH_NEW, NewAnswers
from pipeline.artifacts.tree_file import ChainLength, TimedSize
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import HeldOutRanks, Replay, replay, replay_dynamic
from pipeline.decoding.tree import STOCK_NODES, TreePath, cartesian_tree
from pipeline.decoding.tree_search import CrossFit, fastest_choice

Overheads = Mapping[int, float]  # by nodes; empty where nothing was timed


@dataclass(frozen=True)
class ChosenTree:
    """The tree that the evaluation chose, its source, its replay, and each node's share of steps.

    If `dynamic` is set, `walked` and `sizes` are of the dynamic tree, and the other fields are of a
    static tree of the same size. The last three fields are None for a tree that the user gave.

    Attributes:
        searches: Each search's rate at this size.
        sizes: The sizes whose overhead was measured.
        searched: The searched tree up to the stock tree's size.
    """

    source: str
    choices: tuple[TreePath, ...]
    node_shares: list[float]
    walked: Replay
    dynamic: DynamicTree | None = None
    searches: dict[str, float] | None = None
    sizes: list[TimedSize] | None = None
    searched: tuple[TreePath, ...] | None = None

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the tree that the evaluation chose or that the user gave."""
        return self.dynamic.num_nodes if self.dynamic else len(self.choices)

    @property
    def depth(self) -> int:
        """The depth of the tree that the evaluation chose or that the user gave."""
        return self.dynamic.max_depth if self.dynamic else max(map(len, self.choices))

    def tokens_by_depth(self) -> list[float]:
        """Return the expected accepted tokens per step at each depth of the chosen tree.

        The expected acceleration rate is 1 plus their sum.
        """
        added = self.walked.depth_shares()
        return [round(tokens, 4) for tokens in added + [0.0] * (self.depth - len(added))]


def given_tree(ranks: HeldOutRanks, choices: tuple[TreePath, ...]) -> ChosenTree:
    """Evaluate the user's own tree (`calibrate.choices`) by a replay of all held-out text."""
    walked = replay(ranks, choices)
    return ChosenTree("calibrate.choices", choices, walked.node_shares(ranks, choices), walked)


def best_tree(fits: CrossFit, num_nodes: int, overheads: Overheads) -> ChosenTree:
    """Compare searched static trees by replayed rate and measured overhead; return the fastest.

    Every search is compared at every measured number of nodes. Without overheads, the tree with the
    highest rate is returned; it has `num_nodes` nodes, or as many as were found.
    """
    costs: dict[tuple[str, int], float] = {}
    for name, tree in fits.whole.items():
        # Costs jump between sizes, so they are not interpolated: a tree that ends before has the
        # overhead of the next size.
        for size, cost in sorted((overheads or {num_nodes: 1.0}).items()):
            costs.setdefault((name, min(size, len(tree))), cost)
    rates = {choice: fits.replay(*choice).acceleration_rate for choice in costs}
    source, size = fastest_choice(rates, costs)
    searches = {}
    for name, tree in fits.whole.items():
        searches[name] = fits.replay(name, min(size, len(tree))).acceleration_rate
    return ChosenTree(
        source,
        fits.whole[source][:size],
        fits.node_shares(source, size),
        fits.replay(source, size),
        searches=searches,
        sizes=_timed_sizes({each: fits.replay(source, each) for each in overheads}, overheads),
        searched=fits.whole[source][:STOCK_NODES],
    )


def best_dynamic_tree(
    tree: DynamicTree, places: HeldOutRanks, fits: CrossFit, overheads: Overheads
) -> ChosenTree:
    """Evaluate the measured sizes of the dynamic tree; return the expected fastest one.

    Without overheads the tree keeps its size. The result also holds the best static tree of the
    same size. A dynamic tree is not fitted to held-out text, so every size is judged on all of it.
    """
    costs = overheads or {tree.num_nodes: 1.0}
    walks = {size: replay_dynamic(places, size) for size in sorted(costs)}
    rates = {size: walked.acceleration_rate for size, walked in walks.items()}
    size = fastest_choice(rates, costs)
    return replace(
        best_tree(fits, size, {}),
        walked=walks[size],
        sizes=_timed_sizes(walks, overheads),
        dynamic=tree.resized(size),
    )


def _timed_sizes(walks: Mapping[int, Replay], overheads: Overheads) -> list[TimedSize]:
    """Return the expected rate and speedup of each tree size whose overhead was measured."""
    rows = []
    for size in sorted(overheads):
        rows.append(TimedSize(nodes=size, **expected_speedup(walks[size], overheads[size])))
    return rows


def expected_speedup(walked: Replay, overhead: float | None = None) -> dict[str, float | None]:
    """Compute a replay's expected acceleration rate and speedup, as fields of `Expected`.

    Without an overhead there is no speedup.
    """
    found = walked.estimate()
    figures = {
        "expected_acceleration_rate": rounded(found.rate),
        "expected_standard_error": rounded(found.standard_error),
    }
    if overhead is not None:
        figures["overhead"] = rounded(overhead)
        figures["expected_speedup"] = rounded(found.rate / overhead)
    return figures


def chains(most: int) -> dict[int, tuple[TreePath, ...]]:
    """Map each evaluated draft length, up to `most`, to the chain of the heads' first guesses."""
    return {num_tokens: cartesian_tree([1] * num_tokens) for num_tokens in range(1, most + 1)}


def chosen_chain(
    ranks: HeldOutRanks, most: int, default: int, overheads: Overheads
) -> tuple[int, list[ChainLength]]:
    """Evaluate vLLM's draft lengths up to `most`; return the fastest one, and the figures of each.

    Without finite overheads, the choice is `default`.
    """
    timed = {num_tokens: cost for num_tokens, cost in overheads.items() if np.isfinite(cost)}
    rates = {}
    figures = []
    for num_tokens, chain in chains(most).items():
        walked = replay(ranks, chain)
        row = ChainLength(
            draft_tokens=num_tokens,
            new=expected_on_new(ranks, walked),
            **expected_speedup(walked, timed.get(num_tokens)),
        )
        figures.append(row)
        if num_tokens in timed:
            rates[num_tokens] = walked.acceleration_rate
    if not timed:
        return default, figures
    return fastest_choice(rates, timed), figures


def expected_on_new(text: HeldOutRanks, walked: Replay) -> NewAnswers:
    """Evaluate a tree on answers in no training row: their number, and the expected rate.

    With fewer than `ENOUGH_NEW` such answers there is no rate.
    """
    num_new = int((~text.seen).sum())
    if num_new < ENOUGH_NEW:
        return NewAnswers(answers=num_new)
    return NewAnswers(answers=num_new, **expected_speedup(walked.new_answers()))
