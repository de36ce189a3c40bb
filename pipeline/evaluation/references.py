"""Compare answers with the references in a file of questions: exact match, by category.

A reference is a text for each turn (`reference`, as in MT-Bench and Spec-Bench), or one for the
last turn (`answer`, as in GSM8K, where the part after `####` counts). If the reference is a number,
an answer matches if its last number is equal. Otherwise an answer matches as in SQuAD (arXiv
1606.05250): both texts are equal without case, punctuation, articles and extra white space. Limit:
free text such as an essay matches nothing; it needs a judge.
"""

from __future__ import annotations

import re
import statistics
import string
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.conversations.file_rows import json_rows, open_seed_file
from pipeline.conversations.forms import ID_KEYS
from pipeline.evaluation.answer_files import Line

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
FINAL = "####"


def read_references(path: Path) -> dict[str, list[str]]:
    """Read the reference answers in a file of questions, by the file's own question ids.

    Questions without an id or a reference are left out, and so are rows that are not JSON objects.
    If an id is repeated, its first row with a reference counts.

    Raises:
        DataError: A JSON array in the file is incomplete or malformed.
    """
    found: dict[str, list[str]] = {}
    with open_seed_file(path) as file:
        for row in json_rows(file, path):
            if not isinstance(row, dict):
                continue
            references = row.get("reference") or row.get("answer")
            if not isinstance(references, list):
                references = [references]
            for key in ID_KEYS:
                if key in row and any(references):
                    found.setdefault(str(row[key]), [str(each or "") for each in references])
                    break
    return found


def matches(answer: str, reference: str) -> bool:
    """Return whether an answer matches a reference, as a number or by SQuAD's rules.

    A reference that is a number is compared with the last number of the answer.
    """
    reference = reference.rpartition(FINAL)[2].strip()
    number = reference.replace(",", "")
    if NUMBER.fullmatch(number):
        found = NUMBER.findall(answer.rpartition(FINAL)[2].replace(",", ""))
        return bool(found) and float(found[-1]) == float(number)
    return _normalized(answer) == _normalized(reference)


def exact_match(
    answers: Mapping[str, Sequence[Line]], references: Mapping[str, Sequence[str]]
) -> list[dict[str, str | int | float]]:
    """Compute the share of each method's answers that match their reference, by category.

    Args:
        answers: The lines of each method's answers, in FastChat's or Spec-Bench's schema.

    Returns:
        [{"category", "answers": number of compared answers, METHOD: share, …}]; empty if nothing
            can be compared.
    """
    categories: dict[str, str] = {}  # by question; only lines in Spec-Bench's schema name theirs
    verdicts: dict[str, dict[str, list[bool]]] = {}  # of each answer, by category and method
    for method, lines in answers.items():
        for line in lines:
            question = str(line["question_id"])
            category = categories.setdefault(question, line.get("category", ""))
            found = _verdicts(line["choices"][0]["turns"], references.get(question, []))
            if found:
                by_method = verdicts.setdefault(category, {})
                by_method.setdefault(method, []).extend(found)
    rows = []
    for category, by_method in verdicts.items():
        row: dict[str, str | int | float] = {"category": category}
        row["answers"] = max(map(len, by_method.values()))
        for method, found in by_method.items():
            row[method] = round(statistics.fmean(found), 4)
        rows.append(row)
    return rows


def _verdicts(turns: Sequence[str], expected: Sequence[str]) -> list[bool]:
    """Return whether each answer with a reference matches it.

    A single reference belongs to the last turn.
    """
    if len(expected) == 1:  # of the last turn
        turns = turns[-1:]
    pairs = zip(turns, expected, strict=False)
    return [matches(turn, reference) for turn, reference in pairs if reference]


def _normalized(text: str) -> str:
    """Normalize a text as SQuAD does: without case, punctuation, articles and extra spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())
