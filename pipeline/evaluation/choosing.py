"""Choose the tree of native decoding and the length of vLLM's chain by their expected speedup.

Acceleration rates come from replays of held-out text, overheads were measured on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from pipeline.artifacts.json_form import rounded
from pipeline.artifacts.seen_answers import ENOUGH_NEW, NewAnswers
from pipeline.artifacts.tree_file import Accuracy, ChainLength, TimedSize
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import HeldOutRanks, Replay, replay, replay_dynamic
from pipeline.decoding.tree import Choices, TreePath, cartesian_tree
from pipeline.decoding.tree_search import CrossFit, fastest_choice

MEASURED_SIZES = (1, 3, 7, 15, 31, 63, 127, 255)  # nodes of the trees whose overhead is measured
Overheads = Mapping[int, float]  # by number of nodes; empty if nothing was timed


@dataclass(frozen=True)
class ChosenTree:
    """A tree for native decoding, with the figures that it was chosen by.

    If `dynamic` is set, `replayed` and `sizes` describe the dynamic tree, and the other fields
    describe a static tree of the same size.

    Attributes:
        replayed: The steps of decoding held-out text with the tree.
        sizes: The figures of each size whose overhead was measured; None for a given tree.
    """

    choices: tuple[TreePath, ...]
    replayed: Replay
    dynamic: DynamicTree | None = None
    sizes: list[TimedSize] | None = None

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the tree, without the root."""
        return self.dynamic.num_nodes if self.dynamic else len(self.choices)

    @property
    def depth(self) -> int:
        """The depth of the tree."""
        return self.dynamic.max_depth if self.dynamic else max(map(len, self.choices))


def given_tree(ranks: HeldOutRanks, choices: tuple[TreePath, ...]) -> ChosenTree:
    """Evaluate the tree of `calibrate.choices` by a replay of all held-out text."""
    return ChosenTree(choices, replay(ranks, choices))


def best_tree(fits: CrossFit, num_nodes: int | None, overheads: Overheads) -> ChosenTree:
    """Return the searched static tree of `num_nodes` nodes, or the fastest one of any size.

    The search may have found fewer nodes. Without a size, all measured sizes are compared by rate
    and overhead (see `fastest_choice`).
    """
    # Overheads jump between sizes, so they are not interpolated: a smaller tree has the overhead of
    # the next larger size.
    timed: dict[int, float] = {}
    for each, cost in sorted(overheads.items()):
        timed.setdefault(min(each, len(fits.whole)), cost)
    replays = {each: fits.replay(each) for each in timed}
    if num_nodes is None:
        rates = {each: found.acceleration_rate for each, found in replays.items()}
        size = fastest_choice(rates, timed)
    else:
        size = min(num_nodes, len(fits.whole))
    return ChosenTree(
        fits.whole[:size],
        fits.replay(size),
        sizes=_timed_sizes(replays, timed),
    )


def best_dynamic_tree(
    tree: DynamicTree,
    places: HeldOutRanks,
    fits: CrossFit,
    num_nodes: int | None,
    overheads: Overheads,
) -> ChosenTree:
    """Return the dynamic tree of `num_nodes` nodes, or of the fastest measured size.

    The fastest size follows from replayed rates and overheads. The result also holds the best
    static tree of the same size. Every size is replayed on all held-out text, since a dynamic tree
    is not fitted to it.
    """
    compared = overheads if num_nodes is None else {num_nodes: 1.0}
    replays = {size: replay_dynamic(places, size) for size in sorted({*compared, *overheads})}
    rates = {size: replays[size].acceleration_rate for size in compared}
    size = fastest_choice(rates, compared)
    return replace(
        best_tree(fits, size, {}),
        replayed=replays[size],
        sizes=_timed_sizes(replays, overheads),
        dynamic=tree.resized(size),
    )


def _timed_sizes(replays: Mapping[int, Replay], overheads: Overheads) -> list[TimedSize]:
    """Return the expected rate and speedup of each tree size whose overhead was measured."""
    rows = []
    for size in sorted(overheads):
        rows.append(TimedSize(nodes=size, **expected_speedup(replays[size], overheads[size])))
    return rows


def expected_speedup(replayed: Replay, overhead: float | None = None) -> dict[str, float | None]:
    """Return a replay's expected acceleration rate with standard error, as fields of `Expected`.

    If the overhead is given, it and the expected speedup are added.
    """
    found = replayed.estimate()
    figures = {
        "expected_acceleration_rate": rounded(found.rate),
        "expected_standard_error": rounded(found.standard_error),
    }
    if overhead is not None:
        figures["overhead"] = rounded(overhead)
        figures["expected_speedup"] = rounded(found.rate / overhead)
    return figures


def chains(most: int) -> dict[int, tuple[TreePath, ...]]:
    """Return the chain of the heads' first guesses for each length from 1 to `most`, by length."""
    return {num_tokens: cartesian_tree([1] * num_tokens) for num_tokens in range(1, most + 1)}


def chosen_chain(
    ranks: HeldOutRanks, most: int, default: int, overheads: Overheads
) -> tuple[int, list[ChainLength]]:
    """Return vLLM's fastest number of draft tokens, and the figures of each number up to `most`.

    Only numbers with a finite overhead can be chosen; if there are none, `default` is returned.
    """
    timed = {num_tokens: cost for num_tokens, cost in overheads.items() if np.isfinite(cost)}
    rates = {}
    figures = []
    for num_tokens, chain in chains(most).items():
        replayed = replay(ranks, chain)
        row = ChainLength(
            draft_tokens=num_tokens,
            new=expected_on_new(ranks, replayed),
            **expected_speedup(replayed, timed.get(num_tokens)),
        )
        figures.append(row)
        if num_tokens in timed:
            rates[num_tokens] = replayed.acceleration_rate
    if not timed:
        return default, figures
    return fastest_choice(rates, timed), figures


def expected_on_new(text: HeldOutRanks, replayed: Replay) -> NewAnswers:
    """Count the answers that are in no training row, and estimate the rate of their replay.

    With fewer than `ENOUGH_NEW` such answers there is no rate.
    """
    num_new = int((~text.seen).sum())
    if num_new < ENOUGH_NEW:
        return NewAnswers(answers=num_new)
    return NewAnswers(answers=num_new, **expected_speedup(replayed.new_answers()))


def timed_trees(fits: CrossFit, dynamic: DynamicTree | None) -> dict[int, Choices | DynamicTree]:
    """Return the trees whose overhead is measured, by number of nodes.

    The numbers are `MEASURED_SIZES`. Static trees are the first nodes of the searched tree;
    if that has fewer nodes than a size, the whole tree is measured instead. Dynamic trees have at
    most as many nodes as the heads propose.
    """
    trees: dict[int, Choices | DynamicTree] = {}
    for size in MEASURED_SIZES:
        if dynamic is None:
            tree = fits.whole[:size]
            trees[len(tree)] = tree
        elif size <= dynamic.num_proposed:
            trees[size] = dynamic.resized(size)
    return trees


def head_accuracies(ranks: HeldOutRanks, top: int, num_heads: int) -> list[Accuracy]:
    """Compute the top-1 to top-5 accuracies of the first `num_heads` heads.

    With `top` below 5 only the first `top` are computed. A head without labels has no accuracies.
    """
    hits_KR, counts_K = ranks.guess_hits(top)
    heads = []
    for head in range(num_heads):
        count = int(counts_K[head])
        shares = {}
        if count:
            for rank, hits in enumerate(hits_KR[head].cumsum()[:5].tolist(), start=1):
                shares[f"top{rank}"] = round(hits / count, 4)
        heads.append(Accuracy(labels=count, **shares))
    return heads
