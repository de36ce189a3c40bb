"""Answers compared with the references that a file of questions carries: exact match, by task.

A reference is a text for each turn (`reference`, as MT-Bench and Spec-Bench have it) or one for the
last (`answer`, as GSM8K has it, of which the part after `####` counts). An answer matches as in
SQuAD (arXiv 1606.05250): the same text without case, punctuation, articles and white space; where
the reference is a number, it is the answer's last number.
Limit: free texts, such as a model essay, match nothing; their tasks are left to a judge.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.artifacts.check_result import Line
from pipeline.conversations.file_rows import json_rows, open_seed_file
from pipeline.conversations.forms import ID_KEYS

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
FINAL = "####"


def read_references(path: Path) -> dict[str, list[str]]:
    """The references of each question, by the file's own id.

    Questions without an id or a reference are left out, and so are rows that are no JSON.
    """
    found: dict[str, list[str]] = {}
    with open_seed_file(path) as file:
        for row in json_rows(file, path):
            if not isinstance(row, dict):
                continue
            references = _references(row)
            for key in ID_KEYS:
                if key in row and references:
                    found.setdefault(str(row[key]), references)
                    break
    return found


def _references(row: Mapping[str, Any]) -> list[str]:
    found = row.get("reference") or row.get("answer")
    values = found if isinstance(found, list) else [found]
    if not any(values):
        return []
    return [str(each) if isinstance(each, str | int | float) else "" for each in values]


def matches(answer: str, reference: str) -> bool:
    """Whether an answer is its reference."""
    reference = reference.rpartition(FINAL)[2].strip()
    if NUMBER.fullmatch(reference):
        numbers = NUMBER.findall(answer.rpartition(FINAL)[2])
        return bool(numbers) and _number(numbers[-1]) == _number(reference)
    return _plain(answer) == _plain(reference)


def exact_match(
    answers: Mapping[str, Sequence[Line]], references: Mapping[str, Sequence[str]]
) -> list[dict[str, str | int | float]]:
    """The share of answers that are their reference, by category.

    Args:
        answers: The lines of each method's answers, in FastChat's or Spec-Bench's schema.

    Returns:
        [{"category", "answers": how many are compared, METHOD: share, …}]; empty where nothing can
        be compared.
    """
    categories: dict[str, str] = {}
    found: dict[str, dict[str, list[bool]]] = {}
    for method, lines in answers.items():
        for line in lines:
            name = str(line["question_id"])
            category = categories.setdefault(name, line.get("category") or "")
            compared = _compared(line["choices"][0]["turns"], references.get(name, ()))
            found.setdefault(category, {}).setdefault(method, []).extend(compared)
    rows = []
    for category, by_method in found.items():
        row: dict[str, str | int | float] = {"category": category, "answers": 0}
        for method, compared in by_method.items():
            if compared:
                row["answers"] = max(len(compared), int(row["answers"]))
                row[method] = round(sum(compared) / len(compared), 4)
        if row["answers"]:
            rows.append(row)
    return rows


def _compared(turns: Sequence[str], references: Sequence[str]) -> list[bool]:
    """Whether each turn that has a reference is it; a single reference is the last turn's."""
    if len(references) == 1:
        turns = turns[-1:]
    pairs = zip(turns, references, strict=False)
    return [matches(turn, reference) for turn, reference in pairs if reference]


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _plain(text: str) -> str:
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())
