"""Calibration on a file of its own: the target answers the file's questions, and its heads are
measured on the answers.

Answers are greedy, as those of held-out rows are, so that they foretell greedy decoding. Neither
the file's own answers nor anything of the run's rows are used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.artifacts.seen_answers import TrainingText
from pipeline.artifacts.trained_heads import read_trained_heads
from pipeline.config import GenerateConfig
from pipeline.conversations.conversation import Conversation, RowRejected
from pipeline.conversations.dialogue import Dialogue, DialogueSettings
from pipeline.conversations.requests import Sampling
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import HeldOutPlaces, HeldOutRanks
from pipeline.errors import DataError
from pipeline.evaluation.answer_states import AnswerStates, answer_states, guess_places, guess_ranks
from pipeline.evaluation.prompts import Counted, Prompt
from pipeline.execution.progress import ProgressReporter
from pipeline.targets.dialogue_pool import converse
from pipeline.targets.engines import make_generation_engine
from pipeline.targets.loading import input_device, load_causal_lm
from pipeline.targets.spec import TargetSpec, context_length, eos_token_ids, load_chat_template

Answers = list[tuple[Prompt, list[int]]]  # up to where each answer begins, and the answer


def written_answers(
    target: TargetSpec,
    conversations: Sequence[Conversation],
    settings: GenerateConfig,
    gpus: int,
    where: str,
    progress: ProgressReporter | None = None,
) -> Answers:
    """The target's greedy answers to the conversations' questions, asked one after another.

    Raises:
        DataError: There is none of at least two tokens.
    """
    template = load_chat_template(target)
    sampling = Sampling(0.0, 1.0, settings.max_new_tokens, eos_token_ids(target))
    replay = DialogueSettings(
        "replay", sampling, context_length(target), settings.rounds, settings.on_truncated
    )
    dialogues = [Dialogue(conversation, template, replay) for conversation in conversations]
    progress = progress or ProgressReporter()
    asked = (
        sum(message.role == "user" for message in conversation.messages)
        for conversation in conversations
    )
    progress.begin(
        "answers to calibrate.data",
        sum(min(turns, settings.rounds) for turns in asked),
        unit="answers",
    )
    if dialogues:
        engine = make_generation_engine(
            settings.engine, target, settings.engine_args, gpus, settings.batch_invariant
        )
        try:
            converse(dialogues, Counted(engine, progress))
        finally:
            engine.close()
    answers: Answers = []
    for number, dialogue in enumerate(dialogues):
        with contextlib.suppress(RowRejected):  # it has no answer
            for row in dialogue.rows():
                for span in (span for span in row.spans if len(span) > 1):
                    prompt = Prompt(row.id, row.input_ids[: span.start], question_id=number)
                    answers.append((prompt, row.input_ids[span.start : span.end]))
    if not answers:
        raise DataError(
            "No row of the file is a conversation that the target answers with more than one"
            " token.",
            where,
            "Name a file with questions in a form that seeds may have (medusa-distill inspect shows"
            " them).",
        )
    return answers


def measured_on_answers(
    target: TargetSpec,
    heads: str,
    answers: Answers,
    top: int,
    tree: DynamicTree | None,
    gpus: int,
    trained: TrainingText,
    progress: ProgressReporter | None = None,
) -> tuple[HeldOutRanks, HeldOutPlaces | None]:
    """The ranks of the answers' tokens among the heads' guesses, and their places in a dynamic
    tree.

    The states are those of the target that wrote the answers; `trained` has its answers in training
    rows.
    """
    model = load_causal_lm(target, "cuda" if gpus else "cpu", max(1, gpus))
    module = read_trained_heads(Path(heads)).to(input_device(model), model.dtype)
    prompts, texts = zip(*answers, strict=True)
    progress = progress or ProgressReporter()
    seen = trained.answers()

    def states(part: str) -> Iterator[AnswerStates]:
        progress.begin(part, len(texts), unit="answers")
        for text, found in zip(
            texts, answer_states(model, module, prompts, texts, seen), strict=True
        ):
            yield found
            progress.advance(tokens=len(text))

    ranks = guess_ranks(module, states("the heads' accuracies"), top)
    return ranks, guess_places(module, states("a dynamic tree's places"), tree) if tree else None
