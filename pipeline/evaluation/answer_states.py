"""Plain greedy answers as the heads see them, and where the answers' tokens stand among their
guesses.

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

from pipeline.artifacts.seen_answers import SeenAnswers
from pipeline.conversations.spans import IGNORED
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import HeldOutPlaces, HeldOutRanks
from pipeline.decoding.steps import last_positions
from pipeline.evaluation.prompts import Prompt, conversations_of
from pipeline.heads.accuracy import label_ranks
from pipeline.heads.kind import Heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AnswerStates(NamedTuple):
    """Where steps of an answer may begin: the states that the heads read, the next tokens, and
    those after them.

    The turns of one question are one `conversation`. `seen`: whether the target has written the
    answer in a training row as well.
    """

    conversation: int | str
    seen: bool
    hidden_ND: Tensor
    next_N: Tensor
    labels_KN: Tensor


def answer_states(
    model: PreTrainedModel,
    heads: Heads,
    prompts: Sequence[Prompt],
    answers: Sequence[list[int]],
    trained: SeenAnswers | None = None,
) -> Iterator[AnswerStates]:
    """The states of every answer that takes a step, by one forward each, on the heads' device.

    An answer's first token comes from the prefill: steps begin there and at each later token but
    the last.

    Args:
        trained: The answers in training rows; None where they are not known, and none counts as
            seen.
    """
    num_heads, device = heads.shape.max_depth, heads.device
    for prompt, answer, conversation in zip(
        prompts, answers, conversations_of(prompts), strict=True
    ):
        if len(answer) == 1:
            continue
        later_N = torch.tensor(answer[1:])
        labels_KN = torch.full((num_heads, len(later_N)), IGNORED)
        for head in range(min(num_heads, len(later_N))):
            labels_KN[head, : len(later_N) - head] = later_N[head:]
        states_TD, _ = last_positions(model, prompt.ids + answer[:-1], len(answer))
        next_N = torch.tensor(answer[:-1], device=device)
        seen = trained is not None and answer in trained
        yield AnswerStates(
            conversation, seen, states_TD[:-1].to(device), next_N, labels_KN.to(device)
        )


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
    heads: Heads,
    states: Iterable[AnswerStates],
    measure: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """What is measured [K, N], answers end to end; of each answer its start, its conversation's
    number, and whether it is seen."""
    parts_KN: list[npt.NDArray[Any]] = []
    numbers: dict[int | str, int] = {}
    conversations: list[int] = []
    seen: list[bool] = []
    for answer in states:
        parts_KN.append(measure(answer.hidden_ND, answer.next_N, answer.labels_KN).cpu().numpy())
        conversations.append(numbers.setdefault(answer.conversation, len(numbers)))
        seen.append(answer.seen)
    found_KN = np.concatenate(parts_KN or [np.empty((heads.shape.max_depth, 0), np.uint8)], axis=1)
    lengths = [part.shape[1] for part in parts_KN]
    starts = np.cumsum([0, *lengths])[:-1]
    return found_KN, starts, np.array(conversations, np.int64), np.array(seen, np.bool_)
