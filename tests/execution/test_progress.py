"""Progress is a plain line now and then where nobody watches a terminal."""

from __future__ import annotations

import io
import pickle

import pytest
from rich.console import Console

from pipeline.execution import progress
from pipeline.execution.progress import Meter, Progress, ProgressReporter


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Clock.now)
    return Clock


@pytest.mark.parametrize(
    ("seconds", "reports", "expected"),
    [
        (  # a line every fifteen seconds
            10,
            [Progress("", done, 10, "shards", "5 tokens/s") for done in range(2, 8)],
            [
                "stage: 3 of 10 shards, 1 min 10 s left, 5 tokens/s",
                "stage: 5 of 10 shards, 50 s left, 5 tokens/s",
                "stage: 7 of 10 shards, 30 s left, 5 tokens/s",
            ],
        ),
        (3, [Progress(done=done, total=3) for done in range(4)], []),  # a quick stage
        (20, [Progress(done=512, unit="rows")], ["stage: 512 rows"]),  # nobody knows how many
        (  # the time left restarts with each part
            20,
            [
                Progress("native", 0, 4),
                Progress("native", 2, 4),
                Progress("vLLM", 0, 8),
                Progress("vLLM", 4, 8),
            ],
            [
                "stage: 0 of 4 prompts, time left unknown, native",
                "stage: 2 of 4 prompts, 20 s left, native",
                "stage: 0 of 8 prompts, time left unknown, vLLM",
                "stage: 4 of 8 prompts, 20 s left, vLLM",
            ],
        ),
    ],
)
def test_lines_say_how_far_and_how_long(clock, seconds, reports, expected):
    text = io.StringIO()
    with Meter(Console(file=text, width=40), "stage") as meter:
        for report in reports:
            clock.now += seconds
            meter.show(report)
    assert text.getvalue().splitlines() == expected


def test_what_another_process_reports_is_shown_here(tmp_path, clock):
    shown = []
    here = ProgressReporter(tmp_path / "progress", shown.append)
    there = pickle.loads(pickle.dumps(here))

    def polled() -> list[Progress]:
        shown.clear()
        here.poll()
        return shown

    assert polled() == []
    there.begin("native", 2)
    there.advance()
    assert polled() == [Progress("native", 0, 2)], "half a second has not passed"
    there.advance()
    assert polled() == [Progress("native", 2, 2)], "but it was the last one"
    there.begin("vLLM", 0, done=36, unit="prompts at once")
    assert polled() == [Progress("vLLM", 36, 0, "prompts at once")]
    here.close()
    assert list(tmp_path.iterdir()) == []


def test_what_this_process_reports_is_shown_at_once(tmp_path):
    shown = []
    here = ProgressReporter(tmp_path / "progress", shown.append)
    here.begin("", 9, unit="steps")
    here.update(4, "loss 1.000")
    assert (
        shown[-1] == Progress("", 4, 9, "steps", "loss 1.000")
        and not (tmp_path / "progress").exists()
    )
