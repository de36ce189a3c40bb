"""Progress crosses process borders, and is printed as plain lines without a terminal."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.execution import progress
from pipeline.execution.progress import Meter, Progress, ProgressReporter, ShardProgress
from pipeline.storage import progress_file
from pipeline.storage.progress_file import ProgressFile
from pipeline.storage.shards import ShardTask


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
            [Progress("", done, 10, "shards", "loss 1") for done in range(2, 8)],
            [
                "stage: 3 of 10 shards, loss 1",
                "stage: 5 of 10 shards, 50 s left, loss 1",
                "stage: 7 of 10 shards, 30 s left, loss 1",
            ],
        ),
        (20, [Progress(done=512, unit="rows")], ["stage: 512 rows"]),  # nobody knows how many
        (20, [Progress("vLLM starts")] * 4, ["stage: vLLM starts"]),  # once
        (  # all are in flight; then the first ends and says how long the others may be
            20,
            [
                Progress("", 0, 260, "rows"),
                Progress("", 0, 260, "rows", "", 1900, 260 * 1900),
                Progress("", 0, 260, "rows", "", 3800, 259 * 1900),
                Progress("", 0, 260, "rows", "", 3800, 259 * 1900),
                Progress("", 1, 260, "rows", "", 5700, 5700),
            ],
            [
                "stage: 0 of 260 rows",
                "stage: 0 of 260 rows, 1,900 tokens",
                "stage: 0 of 260 rows, at most 1 h 26 min left, 3,800 tokens, 95.0 tokens/s",
                "stage: 1 of 260 rows, 1 min 01 s left, 5,700 tokens, 63.3 tokens/s",
            ],
        ),
        (  # the time left restarts with each part
            20,
            [
                Progress("native", 1, 4),
                Progress("native", 2, 4),
                Progress("native", 3, 4),
                Progress("vLLM", 0, 8),
            ],
            [
                "stage: 1 of 4 prompts, native",
                "stage: 2 of 4 prompts, native",
                "stage: 3 of 4 prompts, 20 s left, native",
                "stage: 0 of 8 prompts, vLLM",
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


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([Progress("vLLM starts")], "vLLM starts 0:00:20"),
        (
            [Progress("", done, 4, "steps", "loss 1.0") for done in (0, 1, 2)],
            "2 of 4 steps, loss 1.0 0:01:00 40 s left",
        ),
        ([Progress("", done, 2) for done in (0, 1, 2)], "2 of 2 prompts 0:00:40"),
    ],
)
def test_a_terminal_shows_units_and_no_invented_end(clock, reports, expected):
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    meter = Meter(console, "stage")
    meter.show(Progress("before", 3, 8))
    for report in reports:
        meter.show(report)
        clock.now += 20
    with console.capture() as shown:
        console.print(meter._bar.get_renderable())
    words = shown.get().split()[1:]
    assert " ".join(word for word in words if set(word) - set("━╸╺")) == expected


def test_what_another_process_reports_is_shown_here(tmp_path, clock):
    shown = []
    here = ProgressReporter(tmp_path / "progress", shown.append)
    there = pickle.loads(pickle.dumps(here))

    def polled():
        shown.clear()
        here.poll()
        return shown

    assert polled() == []
    there.begin("native", 2)
    there.advance()
    there.advance()
    assert polled() == [Progress("native", 2, 2)], "at once, since it is the last one"
    there.begin("vLLM", 0, done=36, unit="prompts at once")
    assert polled() == [Progress("vLLM", 36, 0, "prompts at once")]
    here.close()
    assert list(tmp_path.iterdir()) == []
    here.begin("", 9, unit="steps")
    here.update(4, note="loss 1.000")
    assert shown[-1] == Progress("", 4, 9, "steps", "loss 1.000"), "at once"


def test_a_request_to_stop_crosses_to_the_other_process(tmp_path):
    here = ProgressReporter(tmp_path / "progress", lambda _: None)
    there = pickle.loads(pickle.dumps(here))
    assert not there.asked_to_stop and not here.has_begun
    there.begin("", 9)
    here.poll()
    here.ask_to_stop()
    assert there.asked_to_stop and here.asked_to_stop and here.has_begun
    here.close()
    assert not there.asked_to_stop and list(tmp_path.iterdir()) == []


def test_a_report_within_half_a_second_is_left_out(tmp_path, clock):
    there, here = ProgressFile(tmp_path / "file"), ProgressFile(tmp_path / "file")
    for clock.now, seen in [(0.0, 0.0), (0.4, 0.0), (0.6, 0.6), (1.0, 0.6), (1.2, 1.2)]:
        there.write({"at": clock.now})
        assert here.read() == {"at": seen}


def test_a_full_disk_stops_no_work(tmp_path):
    file = ProgressFile(tmp_path / "not" / "there")
    file.write({"done": 1})
    file.remove()
    assert file.read() is None


def task(index):
    return ShardTask(index, Path("shard"), Path("quarantine"), "f")


def test_workers_counts_are_summed_until_their_shards_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_file, "SECONDS_BETWEEN_REPORTS", 0.0)
    here = ShardProgress(tmp_path, lambda: None)
    worker = pickle.loads(pickle.dumps(here))
    for index, *counts in [(0, 4, 9, 0), (0, 1, 12, 3), (1, 2, 30, 4), (2, 0, 5, 6)]:
        worker.begin(task(index))  # again from zero
        worker.update(task(index), *counts)
    here.poll()
    assert set(here.begun) == {0, 1, 2}
    assert here.total() == {"conversations": 3, "tokens": 47, "tokens_left": 13}
    here.drop(task(1))
    here.poll()
    assert here.total() == {"conversations": 1, "tokens": 17, "tokens_left": 9}
    here.close()
    assert list(tmp_path.iterdir()) == []
