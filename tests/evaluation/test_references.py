"""Exact match with the references of a file of questions."""

from __future__ import annotations

import json

import pytest

from pipeline.evaluation.references import exact_match, matches, read_references


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("The  Clock Museum.", "clock museum", True),
        ("Clock museums", "clock museum", False),
        ("So 3 + 4 makes 7, and the total is $1,042.", "1042", True),
        ("So 3 + 4 makes 7, and the total is 1042.", "She buys 3. #### 1,042", True),
        ("#### 5 and then 6 more words", "6", True),
        ("no number at all", "7", False),
        ("-3.50", "-3.5", True),
    ],
)
def test_case_articles_and_punctuation_do_not_count(answer, reference, same):
    assert matches(answer, reference) is same


def test_references_are_found_by_the_file_s_own_ids(tmp_path):
    """Read JSON and JSON lines that hold a line separator, a byte order mark, and broken JSON."""
    rows = [
        {"question_id": 81, "turns": ["a", "b"], "reference": ["one", "two"]},
        {"id": "gsm-1", "turns": ["c"], "answer": "because.\u2028#### 4"},
        {"question_id": 83, "turns": ["no reference"]},
        "no object",
    ]
    expected = {"81": ["one", "two"], "gsm-1": ["because.\u2028#### 4"]}
    first, *others = (json.dumps(row, ensure_ascii=False) for row in rows)
    lines = ["\ufeff" + first, "{no json", "[" * 10**5, "", *others]
    (tmp_path / "q.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "q.json").write_text(json.dumps(rows))
    assert read_references(tmp_path / "q.jsonl") == expected == read_references(tmp_path / "q.json")


def line(question: object, turns: list[str], category: str = "") -> dict:
    return {"question_id": question, "choices": [{"turns": turns}], "category": category}


def test_shares_are_by_task_and_references_by_turn():
    answers = {
        "plain": [
            line(1, ["x", "4"], "math"),
            line(2, ["one", "two"], "qa"),
            line(3, ["free"], "writing"),
        ],
        "original": [line(1, ["4", "5"]), line(2, ["one", "two"]), line(3, ["free"])],
    }
    references = {"1": ["4"], "2": ["one", "three"]}
    assert exact_match(answers, references) == [
        {"category": "math", "answers": 1, "plain": 1.0, "original": 0.0},
        {"category": "qa", "answers": 2, "plain": 0.5, "original": 0.5},
    ]
    assert exact_match(answers, {}) == []
