"""Files of the check's answers: JSON lines by method."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from pipeline.storage.atomic import JsonObject, write_text

Line = JsonObject  # one question's answer, in Spec-Bench's schema


def write_answers(directory: Path, answers: Mapping[str, Iterable[Line]]) -> None:
    """Write each method's answers to `answers/METHOD.jsonl`, one line per question."""
    for method, lines in answers.items():
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_text(directory / "answers" / f"{method}.jsonl", text)
