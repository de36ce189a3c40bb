"""Evaluate heads on the target's greedy answers: the rank of each token among their guesses.

The answers are those of plain decoding in the check.

Letters: T answer tokens, N states at which steps may begin, D hidden size, K heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.conversations.spans import IGNORED
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import HeldOutRanks
from pipeline.decoding.steps import last_positions
from pipeline.evaluation.prompts import Prompt
from pipeline.heads.accuracy import label_ranks
from pipeline.heads.kind import Heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Answers = list[tuple[Prompt, list[int]]]  # each prompt, and the token ids of its answer


class AnswerStates(NamedTuple):
    """One answer of the target to evaluate heads on: hidden states, tokens and labels.

    Attributes:
        conversation: The id that all turns of a question share.
        hidden_ND: The hidden states at which steps begin.
        next_N: The token that the target chose at each state, the root of the step's tree.
        labels_KN: The tokens that the heads are to guess; `IGNORED` beyond the answer's end.
    """

    conversation: int | str
    hidden_ND: Tensor
    next_N: Tensor
    labels_KN: Tensor


def answer_states(
    model: PreTrainedModel,
    heads: Heads,
    prompts: Sequence[Prompt],
    answers: Sequence[list[int]],
) -> Iterator[AnswerStates]:
    """Yield the states, tokens and labels of each answer, computed by one forward of the target.

    A step may begin at every token of an answer but the last. Answers of one token are left out.

    Args:
        answers: The token ids of the answer to each prompt.
    """
    num_heads = heads.shape.max_depth
    device = heads.device
    for prompt, answer in zip(prompts, answers, strict=True):
        if len(answer) == 1:
            continue
        later_N = torch.tensor(answer[1:])
        labels_KN = torch.full((num_heads, len(later_N)), IGNORED)
        for head in range(min(num_heads, len(later_N))):
            labels_KN[head, : len(later_N) - head] = later_N[head:]
        states_TD, _ = last_positions(model, prompt.ids + answer[:-1], len(answer))
        yield AnswerStates(
            prompt.conversation,
            states_TD[:-1].to(device),
            torch.tensor(answer[:-1], device=device),
            labels_KN.to(device),
        )


def guess_ranks(heads: Heads, states: Iterable[AnswerStates], top: int) -> HeldOutRanks:
    """Rank each token of the target's answers among the first `top` guesses of the heads."""
    return _evaluate_answers(heads, states, partial(label_ranks, heads, top=top))


def guess_places(heads: Heads, states: Iterable[AnswerStates], tree: DynamicTree) -> HeldOutRanks:
    """Rank each token of the target's answers among the nodes that a dynamic tree proposes."""
    return _evaluate_answers(heads, states, partial(tree.places, heads))


@torch.inference_mode()
def _evaluate_answers(
    heads: Heads,
    states: Iterable[AnswerStates],
    measure: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> HeldOutRanks:
    """Rank the tokens of every answer by `measure`, and concatenate the ranks.

    No answer counts as seen in training.

    Args:
        measure: Returns ranks [K, N], given an answer's hidden states, next tokens and labels.
    """
    parts_KN = []
    starts = []
    numbers: dict[int | str, int] = {}
    conversations = []
    length = 0
    for answer in states:
        found_KN = measure(answer.hidden_ND, answer.next_N, answer.labels_KN).cpu().numpy()
        parts_KN.append(found_KN)
        starts.append(length)
        length += found_KN.shape[1]
        conversations.append(numbers.setdefault(answer.conversation, len(numbers)))
    return HeldOutRanks(
        np.concatenate(parts_KN or [np.empty((heads.shape.max_depth, 0), np.uint8)], axis=1),
        np.array(starts, np.int64),
        np.array(conversations, np.int64),
        np.zeros(len(starts), np.bool_),
    )
