"""Answers compared with the references that a file of questions carries: exact match, by task.

A reference is a text for each turn (`reference`, as MT-Bench and Spec-Bench have it) or one for the
last (`answer`, as GSM8K has it, of which what follows `####` counts). An answer matches as in SQuAD
(arXiv 1606.05250): the same text without case, punctuation, articles and white space; where the
reference is a number, the answer's last number is it.
Limit: free texts, such as a model essay, match nothing; their tasks are left to a judge.
"""

from __future__ import annotations

import contextlib
import json
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.conversations.forms import ID_KEYS

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
FINAL = "####"


def read_references(path: Path) -> dict[str, list[str]]:
    """The references of each question, by the file's own id; of questions without an id or a
    reference nothing.

    A file of another form than JSON or JSON lines has none, nor has a line that is no JSON.
    """
    found = {}
    for row in _rows(path):
        name = (
            next((row[key] for key in ID_KEYS if key in row), None)
            if isinstance(row, dict)
            else None
        )
        if name is not None and (references := _references(row)):
            found[str(name)] = references
    return found


def _rows(path: Path) -> Iterator[Any]:
    text = ""
    with contextlib.suppress(OSError, ValueError):
        text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            yield from json.loads(text)
        return
    for line in text.split("\n"):  # U+2028, which `splitlines` cuts at too, may stand in a text
        with contextlib.suppress(ValueError, RecursionError):
            yield json.loads(line)


def _references(row: Mapping[str, Any]) -> list[str]:
    value = row.get("reference") or row.get("answer")
    values = value if isinstance(value, list) else [value]
    return (
        [str(each) if isinstance(each, str | int | float) else "" for each in values]
        if any(values)
        else []
    )


def matches(answer: str, reference: str) -> bool:
    """Whether an answer is its reference."""
    reference = reference.rpartition(FINAL)[2].strip()
    if NUMBER.fullmatch(reference):
        numbers = NUMBER.findall(answer.rpartition(FINAL)[2])
        return bool(numbers) and _number(numbers[-1]) == _number(reference)
    return _plain(answer) == _plain(reference)


def exact_match(
    answers: Mapping[str, Iterable[Mapping[str, Any]]], references: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """The share of answers that are their reference, by category.

    Args:
        answers: The lines of each method's answers, in FastChat's or Spec-Bench's schema.

    Returns:
        [{"category", "answers": how many are compared, METHOD: share, …}]; empty where nothing can
        be compared.
    """
    counts: dict[str, dict[str, list[bool]]] = {}
    categories = {
        str(line["question_id"]): line["category"]
        for lines in answers.values()
        for line in lines
        if line.get("category")
    }
    for method, lines in answers.items():
        for line in lines:
            name, turns = str(line["question_id"]), line["choices"][0]["turns"]
            given = references.get(name, ())
            last = given if len(given) > 1 else [*[""] * (len(turns) - 1), *given]
            compared = [
                matches(turn, each) for turn, each in zip(turns, last, strict=False) if each
            ]
            counts.setdefault(categories.get(name, ""), {}).setdefault(method, []).extend(compared)
    return [
        {"category": category, "answers": max(map(len, by_method.values()))}
        | {
            method: round(sum(found) / len(found), 4)
            for method, found in by_method.items()
            if found
        }
        for category, by_method in counts.items()
        if any(by_method.values())
    ]


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _plain(text: str) -> str:
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())
