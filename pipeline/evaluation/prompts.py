"""The prompts of a check: held-out conversations, or every turn of a file of questions.

From each held-out conversation one prompt is taken. The turns of a question are asked one after
another, as in MT-Bench and Spec-Bench: the prompt of the second turn holds the target's own answer
to the first. Those answers are generated before anything is measured, so that every method decodes
the same prompts.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.artifacts.check_result import PromptSource
from pipeline.artifacts.drawn_rows import NO_CATEGORIES, draw_rows, fitting_answers
from pipeline.artifacts.generated_rows import TokenRow
from pipeline.artifacts.seen_answers import TrainingText
from pipeline.config import CheckConfig
from pipeline.conversations.conversation import Conversation
from pipeline.conversations.dialogue import Dialogue, DialogueSettings
from pipeline.conversations.fair_draw import fair_order, id_hash
from pipeline.conversations.requests import Sampling
from pipeline.decoding.acceptance import AcceptanceRule, acceptance_rule
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.tree import Choices
from pipeline.errors import ConfigError, DataError
from pipeline.execution.progress import SILENT, ProgressReporter
from pipeline.targets.dialogue_pool import run_dialogues
from pipeline.targets.engines import EngineName, make_generation_engine
from pipeline.targets.spec import (
    TargetSpec,
    context_length,
    eos_token_ids,
    load_chat_template,
)


@dataclass(frozen=True)
class Prompt:
    """A prompt of the check: token ids up to where an answer begins.

    `category` is the question's own; for a held-out row without one it is the row's source.
    `question_id` is None for a held-out row.
    """

    id: str
    ids: list[int]
    category: str | None = None
    question_id: int | str | None = None

    @property
    def conversation(self) -> int | str:
        """The question's id, which all its turns share, or the id of a held-out row."""
        return self.id if self.question_id is None else self.question_id


@dataclass(frozen=True)
class Prompts:
    """The check's prompts that leave room for an answer, and the number of skipped ones.

    `sources` says how many held-out rows each source gave; None for a file of questions.
    """

    kept: list[Prompt]
    skipped: int
    sources: list[PromptSource] | None = None


def require_prompts(prompts: Prompts, settings: CheckConfig) -> None:
    """Raise DataError if no prompt leaves room for an answer."""
    if not prompts.kept:
        raise DataError(
            f"No prompt leaves room for {settings.max_new_tokens} tokens in the target's context.",
            f"check.prompts = {settings.prompts}",
            "Lower check.max_new_tokens, or set check.prompts to shorter prompts.",
        )


@dataclass(frozen=True)
class CheckRequest:
    """The input of one engine's check; picklable, because a worker process receives it.

    Attributes:
        export: The export directory, or other heads that only vLLM reads.
        tree: The tree for native decoding.
        gpus: The number of GPUs that the engine spans; 0 is the CPU.
        name: The target's name in the files of answers: `NAME-plain` and `NAME-KIND`.
        assistant: The model of the baseline `assistant`.
        trained: The training rows, to recognize answers that are in one; None if unknown.
        speculative_config: vLLM's speculative configuration; None to take it from `export`.
    """

    target: TargetSpec
    export: Path
    prompts: list[Prompt]
    settings: CheckConfig
    tree: Choices | DynamicTree = ()
    gpus: int = 0
    name: str = "target"
    assistant: TargetSpec | None = None
    trained: TrainingText | None = None
    speculative_config: Mapping[str, Any] | None = None


def rule_of(settings: CheckConfig) -> AcceptanceRule:
    """Build the acceptance rule that the check's settings describe."""
    return acceptance_rule(
        settings.acceptance,
        settings.temperature,
        settings.typical_eps,
        settings.top_p,
    )


def held_out_prompts(
    rows: Iterable[TokenRow],
    number: int,
    room: int,
    split: str = "check",
    categories: Mapping[str, str] = NO_CATEGORIES,
) -> Prompts:
    """Make prompts of up to `number` held-out conversations: the tokens before one answer.

    The rows are those of `draw_rows`, which has the same arguments. A hash chooses among the
    answers of a row whose prompts have at most `room` tokens.
    """
    drawn = draw_rows(rows, number, room, split, categories)
    kept = []
    for row in drawn.rows:
        fitting = fitting_answers(row, room)
        start = fitting[id_hash(row.id) % len(fitting)].start
        category = categories.get(row.parent_id, row.parent_id.rpartition(":")[0])
        kept.append(Prompt(row.id, row.input_ids[:start].tolist(), category))
    return Prompts(kept, drawn.skipped, drawn.sources)


def spread(prompts: Sequence[Prompt], number: int) -> list[int]:
    """Choose up to `number` prompts fairly, at most one per conversation; return their indices.

    Each category has its share. The first of the indices are a fair draw too.
    """
    turn_of: dict[str, int] = {}
    for index in sorted(range(len(prompts)), key=lambda index: id_hash(prompts[index].id)):
        turn_of.setdefault(str(prompts[index].conversation), index)
    categories = {name: prompts[index].category for name, index in turn_of.items()}
    return [turn_of[name] for name in fair_order(categories)[:number]]


def draw_questions(questions: Sequence[Conversation], number: int) -> list[Conversation]:
    """Draw up to `number` questions fairly, each category in its share; keep their order."""
    categories = {question.id: question.category for question in questions}
    chosen = set(fair_order(categories)[:number])
    return [question for question in questions if question.id in chosen]


def question_prompts(
    target: TargetSpec,
    questions: Sequence[Conversation],
    settings: CheckConfig,
    engine: EngineName,
    gpus: int,
    progress: ProgressReporter = SILENT,
) -> Prompts:
    """Build a prompt for every turn of the questions, with the target's answers to earlier turns.

    The last turn is not answered. The answers are greedy, or sampled if the acceptance rule
    samples, and have at most `max_new_tokens` tokens. Prompts that do not fit, and turns that the
    chat template rejects, are skipped and counted.

    Args:
        engine: The engine that answers; it takes all questions at once, and is not started if every
            question has one turn.
    """
    template = load_chat_template(target)
    sampling = Sampling(0.0, 1.0, settings.max_new_tokens, eos_token_ids(target))
    if rule_of(settings).samples:
        sampling = replace(sampling, temperature=settings.temperature, top_p=settings.top_p)
    replay = DialogueSettings(
        "replay", sampling, context_length(target), ends_at_flaws=False, answers_last=False
    )
    dialogues = [Dialogue(question, template, replay) for question in questions]
    if any(dialogue.needs_answers for dialogue in dialogues):
        progress.begin(f"{engine} starts", 0)
        running = make_generation_engine(engine, target, {}, gpus)
        progress.begin("the prompts of later turns", len(dialogues), unit="questions")
        with contextlib.closing(running):
            run_dialogues(dialogues, running, progress.update)
    else:
        run_dialogues(dialogues, None)
    room = context_length(target) - settings.max_new_tokens
    num_turns = 0
    kept = []
    for question, name, dialogue in zip(questions, question_ids(questions), dialogues, strict=True):
        num_turns += sum(message.role == "user" for message in question.messages)
        for turn, ids in enumerate(dialogue.prompts()):
            if len(ids) <= room:
                kept.append(Prompt(f"{question.id}/{turn}", ids, question.category, name))
    return Prompts(kept, num_turns - len(kept))


def with_room(target: TargetSpec, settings: CheckConfig) -> TargetSpec:
    """Return the target with the check's context length as `max_tokens`.

    The length is `check.max_tokens`, at most the model's own context; without that setting it is
    the model's own context. `target.max_tokens` is kept only if neither is known.
    """
    longer = replace(target, max_tokens=settings.max_tokens)
    try:
        return replace(longer, max_tokens=context_length(longer))
    except ConfigError:
        return target


def with_room_for(
    target: TargetSpec, prompts: Sequence[Prompt], max_new_tokens: int, draft_tokens: int
) -> TargetSpec:
    """Return the target with the shortest context that the check's prompts need, as `max_tokens`.

    Engines reserve memory for the whole context. The context has room for the longest prompt, its
    answer and two drafts, because vLLM drafts only while two drafts fit. The target's own context
    is the limit.
    """
    longest = max(len(prompt.ids) for prompt in prompts) + max_new_tokens + 2 * draft_tokens
    return replace(target, max_tokens=min(context_length(target), longest))


def question_ids(questions: Sequence[Conversation]) -> list[int | str]:
    """Return the id of each question in its file; a missing or repeated id becomes `source:row`.

    An id that is the decimal form of an integer becomes this integer: "7", but not "007".
    """
    times = Counter(question.source_id for question in questions)
    found = []
    for question in questions:
        name = question.source_id
        if not name or times[name] > 1:
            name = question.id
        is_number = name.isdecimal() and name == str(int(name))
        found.append(int(name) if is_number else name)
    return found
