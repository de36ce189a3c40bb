from __future__ import annotations

import json

from pipeline.artifacts.check_result import (
    CheckResult,
    GreedyMatch,
    NativeFigures,
    TunedDrift,
    VllmFigures,
    read_answers,
    write_answers,
    write_model_answers,
)
from pipeline.artifacts.json_form import from_json, to_json

NATIVE = NativeFigures(acceleration_rate=1.9, greedy_match=GreedyMatch(8, 5, 2))
VLLM = VllmFigures(
    acceleration_rate=1.0, greedy_match=GreedyMatch(8, 5, 2), accepted_per_position=[0.0, 0.0]
)


def test_a_result_comes_back_as_it_was_written():
    found = CheckResult(native=NATIVE, vllm=VLLM, drift=TunedDrift(kl=0.1), passed=False)
    written = json.loads(json.dumps(to_json(found)))
    assert from_json(CheckResult, written) == found
    match = {"sequences": 8, "identical": 5, "ties": 2}
    assert written["native"] == {"acceleration_rate": 1.9, "greedy_match": match}


def test_answers_are_one_line_per_question(tmp_path):
    lines = [{"question_id": 1, "text": "é"}, {"question_id": 2}]
    write_answers(tmp_path, {"plain": lines, "medusa": []})
    written = (tmp_path / "answers" / "plain.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in written.splitlines()] == lines and "é" in written
    assert (tmp_path / "answers" / "medusa.jsonl").read_text() == ""
    original = [{"model_id": "target-original", "question_id": 1}]
    write_model_answers(tmp_path, original)
    found = read_answers(tmp_path)
    assert list(found) == ["plain", "medusa", "original"] and found["original"] == original
