"""Files of the check's answers: JSON lines by method, and by model for FastChat's judge."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pipeline.storage.atomic import JsonObject, write_text

Line = JsonObject  # one question's answer, in Spec-Bench's or FastChat's schema


def write_answers(directory: Path, answers: Mapping[str, Iterable[Line]]) -> None:
    """Write each method's answers to `answers/METHOD.jsonl`, one line per question."""
    for method, lines in answers.items():
        _write_answer_lines(directory / "answers" / f"{method}.jsonl", lines)


def write_model_answers(directory: Path, lines: Sequence[Line]) -> None:
    """Write a model's answers for FastChat's judge to `model_answer/MODEL.jsonl`.

    Without lines, no file is written.
    """
    if lines:
        _write_answer_lines(directory / "model_answer" / f"{lines[0]['model_id']}.jsonl", lines)


def _write_answer_lines(path: Path, lines: Iterable[Line]) -> None:
    """Write answers to a file, as JSON lines."""
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
