"""Optional studies of the check (`check.studies`): trees, acceptance rules, heads.

    trees    plain decoding, top-1 chain, the authors' stock tree, a searched tree of its
             size, the export's own tree, and a tree of that tree's size that is dynamic
             if the export's is static, and static if it is dynamic
    heads    the export's tree cut at each depth
    load     vLLM as a server under load; see served.py

Greedy decoding gives the same text with any tree, so `trees` and `heads` decode nothing: one
forward over each prompt and its plain answer gives the states that the heads read, and a replay of
the answer gives each tree's acceleration rate, equal to that of decoding up to ties. The time of a
step is measured on a few prompts, so overheads can be compared within a study, but not with the
check's.

    acceleration rate  tokens kept / target forwards after the prefill, pooled over sequences
    overhead           seconds per step / seconds per plain step of the same prompts, in turns
    speedup            acceleration rate / overhead
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipeline.artifacts.check_result import (
    SEARCHED_TREE,
    STOCK_TREE,
    ChainRate,
    Studies,
    TreeRow,
)
from pipeline.artifacts.json_form import rounded
from pipeline.artifacts.tree_file import Calibration
from pipeline.config import CheckConfig
from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import replay, replay_dynamic
from pipeline.decoding.tree import STOCK_NODES, TreePath, cartesian_tree, greedy_tree, stock_tree
from pipeline.evaluation.answer_states import AnswerStates, answer_states, guess_places, guess_ranks
from pipeline.evaluation.overhead import overheads, step_seconds
from pipeline.evaluation.prompts import Prompt, spread
from pipeline.execution.progress import SILENT, ProgressReporter
from pipeline.heads.kind import Heads

NUM_TIMED = 4  # prompts
GUESSES = 10  # per node of the dynamic tree beside a static one

AnyTree = Sequence[TreePath] | DynamicTree


@dataclass(frozen=True)
class Decoding:
    """The decoders, prompts and plain greedy answers of the check, for its studies."""

    plain: Decoder
    accelerated: Decoder
    prompts: Sequence[Prompt]
    answers: Sequence[list[int]]

    @property
    def heads(self) -> Heads:
        """The heads that the studies decode with."""
        assert self.accelerated.heads is not None
        return self.accelerated.heads

    def states(self) -> Iterator[AnswerStates]:
        """Compute the states, tokens and labels of the plain answers, one answer at a time."""
        return answer_states(self.plain.model, self.heads, self.prompts, self.answers)


def run_studies(
    decoding: Decoding,
    settings: CheckConfig,
    calibration: Calibration | None,
    progress: ProgressReporter = SILENT,
) -> Studies | None:
    """Run the native studies that the check's `settings` name; return None if they name none.

    Args:
        calibration: The calibrated trees; only the study `trees` needs them.
    """
    asked = [name for name in settings.studies if name != "load"]
    if not asked:
        return None
    found = Studies()
    for number, name in enumerate(asked):
        progress.begin(f"native study {name}", len(asked), done=number, unit="studies")
        if name == "trees":
            assert calibration is not None
            found = replace(found, trees=tree_ladder(decoding, calibration))
        else:
            found = replace(found, heads=heads_used(decoding))
    return found


def tree_ladder(decoding: Decoding, calibration: Calibration) -> list[TreeRow]:
    """Compare decoding without a tree and with several trees (study `trees`).

    If the export's tree is static, a dynamic tree of its size is measured too. If it is dynamic, a
    searched static tree of its size is measured too.
    """
    shape = decoding.heads.shape
    used = decoding.accelerated.tree
    stock = stock_tree(shape.num_heads)
    trees: dict[str, AnyTree] = {
        "plain": (),
        "top-1 chain": cartesian_tree([1] * shape.num_heads),
        STOCK_TREE: stock,
        SEARCHED_TREE: searched_tree(calibration)[: len(stock)],
    }
    if isinstance(used, DynamicTree):
        trees["searched, the export's size"] = calibration.choices
        trees["the export's, dynamic"] = used
    else:
        smallest = DynamicTree(1, shape.num_heads, min(GUESSES, shape.vocab_size))
        trees["dynamic, the export's size"] = smallest.resized(used.num_nodes)
        trees["the export's"] = used.choices
    rows = tree_rows(decoding, list(trees.values()))
    return [replace(row, tree=name) for name, row in zip(trees, rows, strict=True)]


def searched_tree(calibration: Calibration) -> tuple[TreePath, ...]:
    """Return the tree that calibration searched, cut to the stock tree's size.

    If calibration searched none, because the user gave a tree, search one by the heads' accuracies.
    """
    if calibration.searched is None:
        return greedy_tree(calibration.accuracies, STOCK_NODES)
    return calibration.searched[:STOCK_NODES]


def heads_used(decoding: Decoding) -> list[TreeRow]:
    """Measure the export's tree cut at depth 1, 2 and so on, by number of heads (study `heads`)."""
    used = decoding.accelerated.tree
    trees: list[AnyTree] = []
    for depth in range(1, used.max_depth + 1):
        if isinstance(used, DynamicTree):
            trees.append(used.resized(used.num_nodes, depth))
        else:
            trees.append([path for path in used.choices if len(path) <= depth])
    rows = tree_rows(decoding, trees)
    return [replace(row, heads=depth) for depth, row in enumerate(rows, start=1)]


def tree_rows(decoding: Decoding, trees: Sequence[AnyTree]) -> list[TreeRow]:
    """Measure the acceleration rate, overhead and speedup of each tree, in order.

    An empty tree is plain decoding; its overhead is 1. A rate or speedup is None if every answer
    ended with its first token.
    """
    model = decoding.plain.model
    room = decoding.plain.max_length
    heads = decoding.heads
    states = list(decoding.states())
    top = 1  # guesses of a head that the static trees need
    endless = plain_decoder(model, eos_token_ids=(), max_length=room)
    decoders = {}
    for number, tree in enumerate(trees):
        if tree:
            decoders[number] = Decoder(model, heads, tree, eos_token_ids=(), max_length=room)
        if not isinstance(tree, DynamicTree):
            top = max([top, *(rank + 1 for path in tree for rank in path)])
    timed = [decoding.prompts[index].ids for index in spread(decoding.prompts, NUM_TIMED)]
    for decoder in (endless, *decoders.values()):  # warm-up
        step_seconds(decoder, timed[0])
    costs = overheads(endless, decoders, timed)
    ranks = guess_ranks(heads, states, top)
    rows = []
    for number, tree in enumerate(trees):
        if isinstance(tree, DynamicTree):
            nodes = tree.num_nodes
            rate = replay_dynamic(guess_places(heads, states, tree), nodes).acceleration_rate
        else:
            nodes = len(tree)
            rate = replay(ranks, tree).acceleration_rate
        cost = costs.get(number, 1.0)  # plain decoding is not among them
        rows.append(
            TreeRow(
                nodes=nodes,
                acceleration_rate=rounded(rate),
                overhead=rounded(cost),
                speedup=rounded(rate / cost),
            )
        )
    return rows


def chain_rate(decoding: Decoding, num_tokens: int) -> ChainRate:
    """Compute the acceleration rate of vLLM's chain of `num_tokens` first guesses.

    The plain answers are replayed with the chain. The rate is None if every answer ended with its
    first token.
    """
    ranks = guess_ranks(decoding.heads, decoding.states(), 1)
    found = replay(ranks, cartesian_tree([1] * num_tokens)).estimate()
    return ChainRate(
        draft_tokens=num_tokens,
        acceleration_rate=rounded(found.rate),
        standard_error=rounded(found.standard_error),
    )
