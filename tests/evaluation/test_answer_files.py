"""The files of the check's answers."""

from __future__ import annotations

import json

from pipeline.evaluation.answer_files import write_answers


def test_answers_are_one_line_per_question(tmp_path):
    lines = [{"question_id": 1, "text": "é"}, {"question_id": 2}]
    write_answers(tmp_path, {"plain": lines, "medusa": []})
    written = (tmp_path / "answers" / "plain.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in written.splitlines()] == lines and "é" in written
    assert (tmp_path / "answers" / "medusa.jsonl").read_text() == ""
