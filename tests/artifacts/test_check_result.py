from __future__ import annotations

import json

import pytest

from pipeline.artifacts.check_result import CheckResult, write_answers

MATCH = {"sequences": 8, "identical": 5, "ties": 2}
NATIVE = {"acceleration_rate": 1.9, "speedup": 1.5, "greedy_match": MATCH}
VLLM = {
    "acceleration_rate": 1.0,
    "speedup": 0.9,
    "greedy_match": MATCH,
    "accepted_per_position": [0.0, 0.0],
}


def test_a_result_is_read_from_the_summary_in_done_json():
    found = CheckResult.of(
        {"vllm": VLLM, "native": NATIVE, "kl": 0.1, "samples": [{"prompt": "Hi"}], "passed": False}
    )
    assert list(found.engines) == ["native", "vllm"] and (found.kl, found.target_text) == (
        0.1,
        None,
    )
    native, vllm = found.engines.values()
    assert (native.acceleration_rate, native.speedup, native.differing, native.accepts_drafts) == (
        1.9,
        1.5,
        1,
        True,
    )
    assert not vllm.accepts_drafts and vllm.figures == VLLM


def test_no_check_has_no_engines_and_one_without_its_match_is_no_result():
    assert CheckResult.of({}).engines == {}
    with pytest.raises(KeyError, match="greedy_match"):
        CheckResult.of({"native": {"acceleration_rate": 1.9}})


def test_answers_are_one_line_per_question(tmp_path):
    lines = [{"question_id": 1, "text": "é"}, {"question_id": 2}]
    write_answers(tmp_path, {"plain": lines, "medusa": []})
    written = (tmp_path / "answers" / "plain.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in written.splitlines()] == lines and "é" in written
    assert (tmp_path / "answers" / "medusa.jsonl").read_text() == ""
