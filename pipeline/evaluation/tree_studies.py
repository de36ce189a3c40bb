"""Studies of trees on the same prompts: kinds of trees, and one tree cut at each depth.

Greedy decoding gives the same text with any tree, so no tree has to decode it: one forward over
each prompt and its plain answer gives the states that the heads read, and a walk through the answer
gives each tree's acceleration rate, equal to decoding's up to ties. The time of a step is measured
on a few prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.artifacts.tree_file import Calibration
from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import simulated_acceleration_rate, walk
from pipeline.decoding.tree import STOCK_NODES, TreePath, cartesian_tree, greedy_tree, stock_tree
from pipeline.evaluation.answer_states import answer_states, guess_places, guess_ranks
from pipeline.evaluation.overhead import Name, overheads, step_seconds, with_tree
from pipeline.evaluation.prompts import Prompt
from pipeline.evaluation.speed import rounded
from pipeline.report.facts import (
    DYNAMIC_TREE,
    SEARCHED_TREE,
    STATIC_TREE,
    STOCK_TREE,
    USED_DYNAMIC_TREE,
    USED_TREE,
)

CARTESIAN = (4, 2, 2, 2)  # guesses per head: 60 nodes
NUM_TIMED = 4  # prompts
GUESSES = 10  # per node of a dynamic tree beside a static one

AnyTree = Sequence[TreePath] | DynamicTree


def tree_ladder(
    plain: Decoder,
    accelerated: Decoder,
    prompts: Sequence[Prompt],
    answers: Sequence[list[int]],
    calibration: Calibration | None,
) -> list[dict[str, Any]]:
    """Acceleration rate, overhead and speedup of each kind of tree, from none to the export's own.

    Beside a static tree stands a dynamic one of its size, beside a dynamic one the static tree of
    the export.

    Args:
        answers: Plain greedy decoding's.
        calibration: As in `run_studies`.
    """
    assert accelerated.heads is not None
    num_heads = accelerated.heads.shape.num_heads
    widths, stock, used = CARTESIAN[:num_heads], stock_tree(num_heads), accelerated.tree
    if isinstance(used, DynamicTree):
        last: dict[str, AnyTree] = {
            STATIC_TREE: calibration.choices if calibration else (),
            USED_DYNAMIC_TREE: used,
        }
    else:
        top = min(GUESSES, accelerated.heads.shape.vocab_size)
        last = {
            DYNAMIC_TREE: DynamicTree(1, num_heads, top).resized(used.num_nodes),
            USED_TREE: used.choices,
        }
    trees: dict[str, AnyTree] = {
        "plain": (),
        "top-1 chain": cartesian_tree([1] * num_heads),
        f"Cartesian {'x'.join(map(str, widths))}": cartesian_tree(widths),
        STOCK_TREE: stock,
        SEARCHED_TREE: searched_tree(calibration)[: len(stock)],
        **last,
    }
    trees = {name: tree for name, tree in trees.items() if tree or name == "plain"}
    worth = tree_figures(plain, accelerated, prompts, answers, trees)
    return [{"tree": name, "nodes": size_of(tree), **worth[name]} for name, tree in trees.items()]


def chain_figures(
    accelerated: Decoder, prompts: Sequence[Prompt], answers: Sequence[list[int]], num_tokens: int
) -> dict[str, float | None]:
    """The acceleration rate of a chain of first guesses on plain greedy answers, as an engine that
    drafts it has.
    """
    assert accelerated.heads is not None
    ranks = guess_ranks(
        accelerated.heads, answer_states(accelerated.model, accelerated.heads, prompts, answers), 1
    )
    found = walk(ranks, cartesian_tree([1] * num_tokens)).estimate()
    figures = {"acceleration_rate": found.rate, "standard_error": found.standard_error}
    return {"draft_tokens": num_tokens} | {
        name: rounded(figure) for name, figure in figures.items()
    }


def heads_used(
    plain: Decoder, accelerated: Decoder, prompts: Sequence[Prompt], answers: Sequence[list[int]]
) -> list[dict[str, Any]]:
    """The export's tree cut at each depth: gain and cost of the deeper heads."""
    used, depths = accelerated.tree, range(1, accelerated.tree.max_depth + 1)
    trees: dict[int, AnyTree]
    if isinstance(used, DynamicTree):
        trees = {depth: used.resized(used.num_nodes, depth) for depth in depths}
    else:
        trees = {depth: [path for path in used.choices if len(path) <= depth] for depth in depths}
    worth = tree_figures(plain, accelerated, prompts, answers, trees)
    return [
        {"heads": depth, "nodes": size_of(tree), **worth[depth]} for depth, tree in trees.items()
    ]


def tree_figures(
    plain: Decoder,
    accelerated: Decoder,
    prompts: Sequence[Prompt],
    answers: Sequence[list[int]],
    trees: Mapping[Name, AnyTree],
) -> dict[Name, dict[str, float | None]]:
    """Every tree's acceleration rate, overhead and speedup; None where no answer takes a step."""
    rates = _rates(trees, accelerated, prompts, answers)
    endless = plain_decoder(plain.model, eos_token_ids=(), max_length=plain.max_length)
    decoders = {name: with_tree(accelerated, tree) for name, tree in trees.items() if tree}
    timed = [prompt.ids for prompt in prompts[:NUM_TIMED]]
    for decoder in (endless, *decoders.values()):  # warm-up
        step_seconds(decoder, timed[0])
    costs = overheads(endless, decoders, timed)
    worth = {}
    for name, tree in trees.items():
        rate, cost = rates[name], costs[name] if tree else 1.0
        figures = {"acceleration_rate": rate, "overhead": cost, "speedup": rate / cost}
        worth[name] = {key: rounded(value) for key, value in figures.items()}
    return worth


def size_of(tree: AnyTree) -> int:
    return tree.num_nodes if isinstance(tree, DynamicTree) else len(tree)


def _rates(
    trees: Mapping[Name, AnyTree],
    accelerated: Decoder,
    prompts: Sequence[Prompt],
    answers: Sequence[list[int]],
) -> dict[Name, float]:
    """Every tree's acceleration rate on these answers."""
    heads = accelerated.heads
    assert heads is not None
    states = list(answer_states(accelerated.model, heads, prompts, answers))
    static = [tree for tree in trees.values() if not isinstance(tree, DynamicTree)]
    ranks = guess_ranks(
        heads,
        states,
        1 + max((rank for tree in static for path in tree for rank in path), default=0),
    )
    return {
        name: guess_places(heads, states, tree).walk(tree.num_nodes).acceleration_rate
        if isinstance(tree, DynamicTree)
        else simulated_acceleration_rate(ranks, tree)
        for name, tree in trees.items()
    }


def searched_tree(calibration: Calibration | None) -> tuple[TreePath, ...]:
    """The tree searched for these heads with the stock tree's size; independent of the device."""
    if calibration is None:
        return ()
    search = calibration.search
    return (
        search.searched[:STOCK_NODES]
        if search
        else greedy_tree(calibration.accuracies, STOCK_NODES)
    )
