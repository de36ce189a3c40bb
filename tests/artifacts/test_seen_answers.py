"""An answer is seen where its tokens, or its first 32, are those of an answer in a training row."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.seen_answers import SeenAnswers
from pipeline.storage.shards import read_rows

LENGTHS = st.sampled_from([1, 2, 31, 32, 33, 40])


def answers_of(length: int):
    return st.lists(st.integers(0, 1), min_size=length, max_size=length)


@st.composite
def answers(draw) -> list[int]:
    """Answers that often share their beginning: a common start, then few different tokens."""
    length = draw(LENGTHS)
    end = draw(answers_of(min(length, 2)))
    return [7] * (length - len(end)) + end


@given(trained=st.lists(answers(), max_size=6), answer=answers())
def test_an_answer_is_seen_by_its_first_32_tokens(trained, answer):
    seen = SeenAnswers()
    for each in trained:
        seen.add(each)
    same_beginning = [each for each in trained if len(each) >= 32 and each[:32] == answer[:32]]
    assert (answer in seen) == (answer in trained or bool(same_beginning))


def written(run, split: str) -> list[tuple[str, list[int]]]:
    """The target's answers in a split, read from the shards."""
    found = []
    for path in run.latest("generate").shards():
        for row in read_rows(path):
            if row["split"] == split:
                found += [
                    (row["id"], row["input_ids"][s["start"] : s["end"]]) for s in row["spans"]
                ]
    return found


def share(answers: Sequence[list[int]], trained: Sequence[list[int]]) -> float:
    """The share of answers that are seen, by comparing all pairs."""
    seen = 0
    for answer in answers:
        same = [each for each in trained if each == answer]
        same += [each for each in trained if len(each) >= 32 and each[:32] == answer[:32]]
        seen += bool(same)
    return seen / len(answers)


def test_calibration_and_the_check_report_the_share_of_seen_answers(finished_run):
    report = json.loads((finished_run.path / "report.json").read_text())
    trained = [answer for _, answer in written(finished_run, "train")]
    taking_a_step = [answer for _, answer in written(finished_run, "calibrate") if len(answer) > 1]
    assert report["tree"]["answers"] == len(taking_a_step)
    assert report["tree"]["seen_share"] == pytest.approx(share(taking_a_step, trained), abs=1e-4)
    new = report["tree"]["new"]["answers"]
    assert new == round(len(taking_a_step) * (1 - share(taking_a_step, trained)))
    native = report["check"]["native"]
    assert native["new"]["answers"] == round(native["prompts"] * (1 - native["seen_share"]))
