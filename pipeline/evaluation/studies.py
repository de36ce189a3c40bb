"""The study of trees (`check.studies`): decoding without a tree and with several trees.

Greedy decoding gives the same text with any tree, so the study decodes nothing: one forward over
each prompt and its plain answer gives the states that the heads read, and a replay of the answer
gives each tree's acceleration rate, equal to that of decoding up to ties. The time of a step is
measured on a few prompts, so overheads can be compared within the study, but not with the check's.

    acceleration rate  tokens kept / target forwards after the prefill, pooled over sequences
    overhead           seconds per step / seconds per plain step of the same prompts, in turns
    speedup            acceleration rate / overhead
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.artifacts.check_result import (
    STOCK_TREE,
    ChainRate,
    TreeRow,
)
from pipeline.artifacts.json_form import rounded
from pipeline.artifacts.tree_file import Calibration
from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import replay, replay_dynamic
from pipeline.decoding.tree import TreePath, cartesian_tree, stock_tree
from pipeline.evaluation.answer_states import AnswerStates, answer_states, guess_places, guess_ranks
from pipeline.evaluation.overhead import overheads, step_seconds
from pipeline.evaluation.prompts import Prompt, spread
from pipeline.heads.kind import Heads

NUM_TIMED = 4  # prompts
GUESSES = 10  # per node of the dynamic tree beside a static one

AnyTree = Sequence[TreePath] | DynamicTree


@dataclass(frozen=True)
class Decoding:
    """The decoders, prompts and plain greedy answers of the check, for the study of trees."""

    plain: Decoder
    accelerated: Decoder
    prompts: Sequence[Prompt]
    answers: Sequence[list[int]]

    @property
    def heads(self) -> Heads:
        """The heads that are checked."""
        assert self.accelerated.heads is not None
        return self.accelerated.heads

    def states(self) -> Iterator[AnswerStates]:
        """Compute the states, tokens and labels of the plain answers, one answer at a time."""
        return answer_states(self.plain.model, self.heads, self.prompts, self.answers)


def tree_ladder(decoding: Decoding, calibration: Calibration) -> list[TreeRow]:
    """Compare plain decoding, the top-1 chain, the authors' stock tree, and searched trees.

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
    }
    if calibration.searched is not None:
        trees["searched, stock size"] = calibration.searched[: len(stock)]
    if isinstance(used, DynamicTree):
        trees["searched, the export's size"] = calibration.choices
        trees["the export's, dynamic"] = used
    else:
        smallest = DynamicTree(1, shape.num_heads, min(GUESSES, shape.vocab_size))
        trees["dynamic, the export's size"] = smallest.resized(used.num_nodes)
        trees["the export's"] = used.choices
    return tree_rows(decoding, trees)


def tree_rows(decoding: Decoding, trees: Mapping[str, AnyTree]) -> list[TreeRow]:
    """Measure the acceleration rate, overhead and speedup of each tree, by name, in order.

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
    for number, tree in enumerate(trees.values()):
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
    for number, (name, tree) in enumerate(trees.items()):
        if isinstance(tree, DynamicTree):
            nodes = tree.num_nodes
            rate = replay_dynamic(guess_places(heads, states, tree), nodes).acceleration_rate
        else:
            nodes = len(tree)
            rate = replay(ranks, tree).acceleration_rate
        cost = costs.get(number, 1.0)  # plain decoding is not among them
        rows.append(
            TreeRow(
                tree=name,
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
