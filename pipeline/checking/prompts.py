"""What the check decodes: the openings of held-out conversations, or a file of questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import SeedSource
from pipeline.conversations.conversation import Conversation, Refusal
from pipeline.conversations.readers import read_source
from pipeline.conversations.template import ChatTemplate
from pipeline.errors import DataError
from pipeline.storage.rows import spans_of
from pipeline.storage.shards import read_rows


@dataclass(frozen=True)
class Prompt:
    """Token ids up to where an answer begins."""

    id: str
    ids: list[int]
    category: str | None = None


@dataclass(frozen=True)
class Prompts:
    """The prompts that fit, and how many did not."""

    kept: list[Prompt]
    skipped: int


def held_out_prompts(generated: Sequence[Path], number: int, room: int) -> Prompts:
    """The first `number` rows of the `check` split: each up to its first answer.

    Args:
        generated: Shards of the generate stage.
        room: Longest prompt in tokens; longer ones are skipped and counted.
    """
    columns = ["id", "split", "input_ids", "spans"]
    rows = (row for path in generated for row in read_rows(path, columns) if row["split"] == "check")
    return _fitting((Prompt(row["id"], row["input_ids"][: spans_of(row)[0].start]) for row in rows), room, number)


def question_prompts(path: Path, template: ChatTemplate, room: int) -> Prompts:
    """The first turn of every question in a file (MT-Bench, Spec-Bench, any form that seeds take).

    Raises:
        DataError: The file holds no question that can be asked.
    """
    rows = read_source(SeedSource(path=path), path.stem, max_characters=10**9)
    prompts = _fitting(_asked((row for row in rows if isinstance(row, Conversation)), template), room)
    if not prompts.kept:
        raise DataError(
            "The file holds no question that fits the target's context.",
            str(path),
            "Name a file of questions in check.prompts, or a number of held-out rows.",
        )
    return prompts


def _asked(questions: Iterator[Conversation], template: ChatTemplate) -> Iterator[Prompt]:
    for question in questions:
        first_user = next(i for i, message in enumerate(question.messages) if message.role == "user")
        try:
            yield Prompt(question.id, template.opening(question.messages[: first_user + 1]), question.category)
        except Refusal:
            continue


def _fitting(prompts: Iterator[Prompt], room: int, number: int | None = None) -> Prompts:
    kept: list[Prompt] = []
    skipped = 0
    for prompt in prompts:
        if len(kept) == number:
            break
        if len(prompt.ids) <= room:
            kept.append(prompt)
        else:
            skipped += 1
    return Prompts(kept, skipped)
