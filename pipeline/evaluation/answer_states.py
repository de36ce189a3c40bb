"""Evaluate heads on the target's greedy answers: the rank of each token among their guesses.

The answers are those of plain decoding in the check, or the target's answers to the questions of
`calibrate.data`.

Letters: T answer tokens, N states at which steps may begin, D hidden size, K heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.artifacts.seen_answers import SeenAnswers, TrainingText
from pipeline.artifacts.trained_heads import read_trained_heads
from pipeline.config import GenerateConfig
from pipeline.conversations.conversation import Conversation, RowRejected
from pipeline.conversations.dialogue import Dialogue, DialogueSettings
from pipeline.conversations.requests import Sampling
from pipeline.conversations.spans import IGNORED
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import HeldOutRanks
from pipeline.decoding.steps import last_positions
from pipeline.evaluation.prompts import Prompt, answer_all
from pipeline.execution.progress import SILENT, ProgressReporter
from pipeline.heads.accuracy import label_ranks
from pipeline.heads.kind import Heads
from pipeline.targets.engines import make_generation_engine
from pipeline.targets.loading import input_device, load_on_gpus
from pipeline.targets.spec import TargetSpec, context_length, eos_token_ids, load_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Answers = list[tuple[Prompt, list[int]]]  # each prompt, and the token ids of its answer


class AnswerStates(NamedTuple):
    """One answer of the target to evaluate heads on: hidden states, tokens and labels.

    Attributes:
        conversation: The id that all turns of a question share.
        seen: Whether the answer is also in a training row.
        hidden_ND: The hidden states at which steps begin.
        next_N: The token that the target chose at each state, the root of the step's tree.
        labels_KN: The tokens that the heads are to guess; `IGNORED` beyond the answer's end.
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
    progress: ProgressReporter = SILENT,
) -> Iterator[AnswerStates]:
    """Yield the states, tokens and labels of each answer, computed by one forward of the target.

    A step may begin at every token of an answer but the last. Answers of one token are left out.

    Args:
        answers: The token ids of the answer to each prompt.
        trained: The answers in training rows; None counts no answer as seen.
    """
    num_heads = heads.shape.max_depth
    device = heads.device
    for prompt, answer in zip(prompts, answers, strict=True):
        progress.advance(tokens=len(answer))
        if len(answer) == 1:
            continue
        later_N = torch.tensor(answer[1:])
        labels_KN = torch.full((num_heads, len(later_N)), IGNORED)
        for head in range(min(num_heads, len(later_N))):
            labels_KN[head, : len(later_N) - head] = later_N[head:]
        states_TD, _ = last_positions(model, prompt.ids + answer[:-1], len(answer))
        yield AnswerStates(
            prompt.conversation,
            trained is not None and answer in trained,
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

    Args:
        measure: Returns ranks [K, N], given an answer's hidden states, next tokens and labels.
    """
    parts_KN = []
    starts = []
    numbers: dict[int | str, int] = {}
    conversations = []
    seen = []
    length = 0
    for answer in states:
        found_KN = measure(answer.hidden_ND, answer.next_N, answer.labels_KN).cpu().numpy()
        parts_KN.append(found_KN)
        starts.append(length)
        length += found_KN.shape[1]
        conversations.append(numbers.setdefault(answer.conversation, len(numbers)))
        seen.append(answer.seen)
    return HeldOutRanks(
        np.concatenate(parts_KN or [np.empty((heads.shape.max_depth, 0), np.uint8)], axis=1),
        np.array(starts, np.int64),
        np.array(conversations, np.int64),
        np.array(seen, np.bool_),
    )


def written_answers(
    target: TargetSpec,
    conversations: Sequence[Conversation],
    settings: GenerateConfig,
    gpus: int,
    progress: ProgressReporter = SILENT,
) -> Answers:
    """Let the target answer the questions of `calibrate.data` greedily.

    Return each prompt with its answer. Conversations without a usable answer are left out.
    """
    template = load_chat_template(target)
    sampling = Sampling(0.0, 1.0, settings.max_new_tokens, eos_token_ids(target))
    replay = DialogueSettings(
        "replay", sampling, context_length(target), settings.rounds, settings.on_truncated
    )
    dialogues = [Dialogue(conversation, template, replay) for conversation in conversations]
    progress.begin(f"{settings.engine} starts", 0)
    engine = make_generation_engine(settings.engine, target, settings.engine_args, gpus)
    progress.begin("answers to calibrate.data", len(dialogues), unit="conversations")
    answer_all(engine, dialogues, progress)
    answers = []
    for number, dialogue in enumerate(dialogues):
        with contextlib.suppress(RowRejected):  # it has no answer
            for row in dialogue.rows():
                for span in row.spans:
                    prompt = Prompt(row.id, row.input_ids[: span.start], question_id=number)
                    answers.append((prompt, row.input_ids[span.start : span.end]))
    return answers


def measured_on_answers(
    target: TargetSpec,
    heads: Path,
    answers: Answers,
    top: int,
    tree: DynamicTree | None,
    gpus: int,
    trained: TrainingText,
    progress: ProgressReporter = SILENT,
) -> tuple[HeldOutRanks, HeldOutRanks | None]:
    """Load target and trained heads, and rank the tokens of the target's answers.

    Args:
        target: The target that wrote the answers.
        heads: The path of the trained heads.
        tree: The dynamic tree; None for no second result.
        trained: The training rows, to recognize answers that are in one.

    Returns:
        The ranks among the heads' first `top` guesses, and the ranks among the nodes that the
            dynamic tree proposes, or None.
    """
    model = load_on_gpus(target, gpus)
    module = read_trained_heads(heads).to(input_device(model), model.dtype)
    prompts = [prompt for prompt, _ in answers]
    texts = [text for _, text in answers]
    seen = trained.answers()

    def states() -> Iterator[AnswerStates]:
        progress.begin("the heads' guesses", len(texts), unit="answers")
        return answer_states(model, module, prompts, texts, seen, progress)

    ranks = guess_ranks(module, states(), top)
    places = None
    if tree is not None:
        places = guess_places(module, states(), tree)
    return ranks, places
