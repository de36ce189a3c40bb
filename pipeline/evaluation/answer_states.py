"""Plain greedy answers as the heads see them, and where the answers' tokens stand among their guesses.

Letters: T answer tokens, N states at which steps may begin, D hidden size, K heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.conversations.spans import IGNORED
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import HeldOutPlaces, HeldOutRanks
from pipeline.decoding.readout import last_positions
from pipeline.evaluation.prompts import Prompt
from pipeline.heads.accuracy import label_ranks
from pipeline.heads.kind import Heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AnswerStates(NamedTuple):
    """Where steps of an answer may begin: the states that the heads read, the next tokens, and those after them.

    The turns of one question are one `conversation`.
    """

    conversation: int | str
    hidden_ND: Tensor
    next_N: Tensor
    labels_KN: Tensor


def answer_states(
    model: PreTrainedModel, heads: Heads, prompts: Sequence[Prompt], answers: Sequence[list[int]]
) -> Iterator[AnswerStates]:
    """The states of every answer that takes a step, by one forward each, on the heads' device.

    An answer's first token comes from the prefill: steps begin there and at each later token but the last.
    """
    num_heads, device = heads.shape.max_depth, heads.device
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if len(answer) == 1:
            continue
        later_N = torch.tensor(answer[1:])
        labels_KN = torch.full((num_heads, len(later_N)), IGNORED)
        for head in range(min(num_heads, len(later_N))):
            labels_KN[head, : len(later_N) - head] = later_N[head:]
        states_TD, _ = last_positions(model, prompt.ids + answer[:-1], len(answer))
        conversation = f"prompt {number}" if prompt.question_id is None else prompt.question_id
        next_N = torch.tensor(answer[:-1], device=device)
        yield AnswerStates(conversation, states_TD[:-1].to(device), next_N, labels_KN.to(device))


def guess_ranks(heads: Heads, states: Iterable[AnswerStates], top: int) -> HeldOutRanks:
    """The ranks of the answers' tokens among the heads' first `top` guesses."""

    def ranks(hidden_ND: Tensor, next_N: Tensor, labels_KN: Tensor) -> Tensor:
        return label_ranks(heads, hidden_ND, next_N, labels_KN, top)

    return HeldOutRanks(*_measured(heads, states, ranks))


def guess_places(heads: Heads, states: Iterable[AnswerStates], tree: DynamicTree) -> HeldOutPlaces:
    """Where the answers' tokens stand among the nodes that the tree proposes."""
    return HeldOutPlaces(*_measured(heads, states, partial(tree.places, heads)))


@torch.inference_mode()
def _measured(
    heads: Heads, states: Iterable[AnswerStates], measure: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """What is measured [K, N], answers end to end, where each begins, and its conversation's number."""
    parts_KN: list[npt.NDArray[Any]] = []
    owners: list[int | str] = []
    for conversation, *row in states:
        parts_KN.append(measure(*row).cpu().numpy())
        owners.append(conversation)
    found_KN = np.concatenate(parts_KN or [np.empty((heads.shape.max_depth, 0), np.uint8)], axis=1)
    numbers = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
    lengths = [part.shape[1] for part in parts_KN]
    return found_KN, np.cumsum([0, *lengths])[:-1], np.array([numbers[owner] for owner in owners], np.int64)
