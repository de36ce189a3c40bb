"""An answer is seen where its tokens, or its first 32, are those of an answer in a training row."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.seen_answers import SeenAnswers, training_text
from tests.flows.tiny import report_of, stored

LENGTHS = st.sampled_from([1, 2, 31, 32, 33, 40])


@st.composite
def answers(draw) -> list[int]:
    """Answers that often share their beginning: a common start, then few different tokens."""
    end = draw(st.lists(st.integers(0, 1), min_size=1, max_size=2))
    return [7] * (draw(LENGTHS) - len(end)) + end


@given(trained=st.lists(answers(), max_size=6), answer=answers())
def test_an_answer_is_seen_by_its_first_32_tokens(trained, answer):
    seen = SeenAnswers()
    for each in trained:
        seen.add(each)
    same_beginning = [each for each in trained if len(each) >= 32 and each[:32] == answer[:32]]
    assert (answer in seen) == (answer in trained or bool(same_beginning))


def written(run, split: str) -> list[list[int]]:
    """The target's answers in a split, read from the shards."""
    found = []
    for row in stored(run.latest("generate")):
        if row["split"] == split:
            found += [row["input_ids"][span["start"] : span["end"]] for span in row["spans"]]
    return found


def test_the_answers_of_training_rows_alone_are_seen(finished_run):
    """This run's held-out answers are all new."""
    seen = training_text(finished_run.latest("generate")).answers()
    assert all(answer in seen for answer in written(finished_run, "train"))
    assert not any(answer in seen for answer in written(finished_run, "check"))
    report = report_of(finished_run)
    taking_a_step = [answer for answer in written(finished_run, "calibrate") if len(answer) > 1]
    tree, native = report["tree"], report["check"]["native"]
    assert tree["answers"] == tree["new"]["answers"] == len(taking_a_step)
    assert native["new"]["answers"] == native["prompts"] == 8
    assert tree["seen_share"] == native["seen_share"] == 0
