"""Studies of trees on the same prompts: kinds of trees, and one tree cut at each depth.

Greedy decoding gives the same text with any tree, so no tree has to decode it: one forward over each prompt and its
plain answer gives the states that the heads read, and a walk through the answer gives each tree's acceleration rate,
equal to decoding's up to ties. The time of a step is measured on a few prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pipeline.artifacts.tree_file import Calibration
from pipeline.conversations.spans import IGNORED
from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.held_out import HeldOutRanks, simulated_acceleration_rate, walk
from pipeline.decoding.readout import last_positions
from pipeline.decoding.stock_trees import STOCK_NODES, stock_tree
from pipeline.decoding.tree import Tree, TreePath, cartesian_tree, greedy_tree
from pipeline.evaluation.overhead import Name, overheads, step_seconds, with_tree
from pipeline.evaluation.prompts import Prompt
from pipeline.evaluation.speed import rounded
from pipeline.heads.accuracy import label_ranks
from pipeline.heads.kind import Heads
from pipeline.report.facts import SEARCHED_TREE, STOCK_TREE, USED_TREE

# T answer tokens, N states at which steps may begin, D hidden size, K heads

CARTESIAN = (4, 2, 2, 2)  # guesses per head: 60 nodes
NUM_TIMED = 4  # prompts


def tree_ladder(
    plain: Decoder,
    accelerated: Decoder,
    prompts: Sequence[Prompt],
    answers: Sequence[list[int]],
    calibration: Calibration | None,
) -> list[dict[str, Any]]:
    """Acceleration rate, overhead and speedup of each kind of tree, from none to the export's own.

    Args:
        answers: Plain greedy decoding's.
        calibration: As in `run_studies`.
    """
    assert accelerated.heads is not None and isinstance(accelerated.tree, Tree)
    num_heads = accelerated.heads.shape.num_heads
    widths, stock = CARTESIAN[:num_heads], stock_tree(num_heads)
    trees: dict[str, Sequence[TreePath]] = {
        "plain": (),
        "top-1 chain": cartesian_tree([1] * num_heads),
        f"Cartesian {'x'.join(map(str, widths))}": cartesian_tree(widths),
        STOCK_TREE: stock,
        SEARCHED_TREE: searched_tree(calibration)[: len(stock)],
        USED_TREE: accelerated.tree.choices,
    }
    trees = {name: tree for name, tree in trees.items() if tree or name == "plain"}
    worth = tree_figures(plain, accelerated, prompts, answers, trees)
    return [{"tree": name, "nodes": len(tree), **worth[name]} for name, tree in trees.items()]


def chain_figures(
    accelerated: Decoder, prompts: Sequence[Prompt], answers: Sequence[list[int]], num_tokens: int
) -> dict[str, float | None]:
    """The acceleration rate of a chain of first guesses on plain greedy answers, as an engine that drafts it has."""
    assert accelerated.heads is not None
    ranks = guess_ranks(accelerated.model, accelerated.heads, prompts, answers, top=1)
    found = walk(ranks, cartesian_tree([1] * num_tokens)).estimate()
    figures = {"acceleration_rate": found.rate, "standard_error": found.standard_error}
    return {"draft_tokens": num_tokens} | {name: rounded(figure) for name, figure in figures.items()}


def heads_used(
    plain: Decoder, accelerated: Decoder, prompts: Sequence[Prompt], answers: Sequence[list[int]]
) -> list[dict[str, Any]]:
    """The export's tree cut at each depth: gain and cost of the deeper heads."""
    assert isinstance(accelerated.tree, Tree)
    choices = accelerated.tree.choices
    trees = {depth: [p for p in choices if len(p) <= depth] for depth in range(1, accelerated.tree.max_depth + 1)}
    worth = tree_figures(plain, accelerated, prompts, answers, trees)
    return [{"heads": depth, "nodes": len(tree), **worth[depth]} for depth, tree in trees.items()]


def tree_figures(
    plain: Decoder,
    accelerated: Decoder,
    prompts: Sequence[Prompt],
    answers: Sequence[list[int]],
    trees: Mapping[Name, Sequence[TreePath]],
) -> dict[Name, dict[str, float | None]]:
    """Every tree's acceleration rate, overhead and speedup; None where no answer takes a step."""
    assert accelerated.heads is not None
    num_guesses = 1 + max(rank for tree in trees.values() for path in tree for rank in path)
    ranks = guess_ranks(accelerated.model, accelerated.heads, prompts, answers, num_guesses)
    endless = plain_decoder(plain.model, eos_token_ids=(), max_length=plain.max_length)
    decoders = {name: with_tree(accelerated, tree) for name, tree in trees.items() if tree}
    timed = [prompt.ids for prompt in prompts[:NUM_TIMED]]
    for decoder in (endless, *decoders.values()):  # warm-up
        step_seconds(decoder, timed[0])
    costs = overheads(endless, decoders, timed)
    worth = {}
    for name, tree in trees.items():
        rate, cost = simulated_acceleration_rate(ranks, tree), costs[name] if tree else 1.0
        figures = {"acceleration_rate": rate, "overhead": cost, "speedup": rate / cost}
        worth[name] = {key: rounded(value) for key, value in figures.items()}
    return worth


def searched_tree(calibration: Calibration | None) -> tuple[TreePath, ...]:
    """The tree searched for these heads with the stock tree's size; independent of the device."""
    if calibration is None:
        return ()
    search = calibration.search
    return search.searched[:STOCK_NODES] if search else greedy_tree(calibration.accuracies, STOCK_NODES)


def guess_ranks(
    model: PreTrainedModel, heads: Heads, prompts: Sequence[Prompt], answers: Sequence[list[int]], top: int
) -> HeldOutRanks:
    """The ranks of the answers' tokens among the heads' first `top` guesses, wherever a step may begin.

    An answer's first token comes from the prefill: steps begin there and at each later token but the last. The turns of
    one question are one conversation.
    """
    num_heads = heads.shape.max_depth
    parts_KN = [np.empty((num_heads, 0), np.uint8)]
    lengths: list[int] = []
    owners: list[int | str] = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if len(answer) == 1:
            continue
        lengths.append(len(answer) - 1)
        owners.append(f"prompt {number}" if prompt.question_id is None else prompt.question_id)
        later_N = torch.tensor(answer[1:])
        labels_KN = torch.full((num_heads, len(later_N)), IGNORED)
        for head in range(min(num_heads, len(later_N))):
            labels_KN[head, : len(later_N) - head] = later_N[head:]
        device = heads.device
        states_TD, _ = last_positions(model, prompt.ids + answer[:-1], len(answer))
        with torch.inference_mode():
            next_N = torch.tensor(answer[:-1], device=device)
            ranks_KN = label_ranks(heads, states_TD[:-1].to(device), next_N, labels_KN.to(device), top)
        parts_KN.append(ranks_KN.cpu().numpy())
    places = {owner: place for place, owner in enumerate(dict.fromkeys(owners))}
    conversations = np.array([places[owner] for owner in owners], np.int64)
    return HeldOutRanks(np.concatenate(parts_KN, axis=1), np.cumsum([0, *lengths])[:-1], conversations)
