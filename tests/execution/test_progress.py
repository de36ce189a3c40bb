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


def lines(meter_of) -> list[str]:
    text = io.StringIO()
    meter_of(Console(file=text, width=40))
    return text.getvalue().splitlines()


def test_a_line_every_fifteen_seconds_says_how_far_and_how_long(clock):
    def work(console):
        with Meter(console, "features", 10, done=2) as meter:
            for _ in range(8):
                clock.now += 10
                meter.advance("5 tokens/s")

    assert lines(work) == [
        "features: 4 of 10 shards, 1 min 00 s left, 5 tokens/s",
        "features: 6 of 10 shards, 40 s left, 5 tokens/s",
        "features: 8 of 10 shards, 20 s left, 5 tokens/s",
        "features: 10 of 10 shards, 0.0 s left, 5 tokens/s",
    ]


def test_a_quick_stage_prints_nothing(clock):
    def work(console):
        with Meter(console, "seeds", 3) as meter:
            meter.advance()

    assert lines(work) == []


def test_where_the_total_is_unknown_no_time_left_is_made_up(clock):
    def work(console):
        with Meter(console, "seeds", 0, unit="rows") as meter:
            clock.now += 20
            meter.update(512)

    assert lines(work) == ["seeds: 512 rows"]


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_REPORTS", 0.0)


def in_another_process(reporter: ProgressReporter) -> ProgressReporter:
    return pickle.loads(pickle.dumps(reporter))


def test_what_another_process_reports_is_shown_here_and_once(tmp_path, at_once):
    shown = []
    here = ProgressReporter(tmp_path / "progress", shown.append)
    here.poll()
    there = in_another_process(here)
    there.begin("native", 36)
    there.advance()
    there.advance(2)
    assert shown == [] and here.read() == Progress("native", 3, 36, "prompts")
    here.poll()
    here.poll()
    there.begin("vLLM", 0, done=36, unit="prompts at once")
    here.poll()
    assert shown == [Progress("native", 3, 36), Progress("vLLM", 36, 0, "prompts at once")]
    here.close()
    assert not (tmp_path / "progress").exists()


def test_the_last_unit_of_a_part_is_written_at_once(tmp_path, clock):
    """The ones between are written every half second."""
    here = ProgressReporter(tmp_path / "progress")
    there = in_another_process(here)
    there.begin("native", 2)
    there.advance()
    assert here.read() == Progress("native", 0, 2)
    there.advance()
    assert here.read() == Progress("native", 2, 2)


def test_what_this_process_reports_is_shown_at_once(tmp_path):
    shown = []
    here = ProgressReporter(tmp_path / "progress", shown.append)
    here.begin("", 9, unit="steps")
    here.update(4, "loss 1.000")
    assert shown[-1] == Progress("", 4, 9, "steps", "loss 1.000") and not (tmp_path / "progress").exists()


def test_a_file_that_is_half_written_says_nothing(tmp_path):
    (tmp_path / "progress").write_text('{"part": "nat')
    assert ProgressReporter(tmp_path / "progress").read() is None


def test_a_disk_that_takes_no_more_stops_nothing(tmp_path):
    reporter = ProgressReporter(tmp_path / "not" / "there")
    reporter.begin("native", 1)
    reporter.advance()


def test_another_part_starts_its_rate_anew(clock):
    def work(console):
        with Meter(console, "check", 0, unit="prompts") as meter:
            meter.show(Progress("native", 0, 4))
            clock.now += 20
            meter.show(Progress("native", 2, 4))
            clock.now += 20
            meter.show(Progress("vLLM", 0, 8))
            clock.now += 20
            meter.show(Progress("vLLM", 4, 8, note="3 tokens/s"))

    assert lines(work) == [
        "check: 2 of 4 prompts, 20 s left, native",
        "check: 0 of 8 prompts, time left unknown, vLLM",
        "check: 4 of 8 prompts, 20 s left, 3 tokens/s, vLLM",
    ]
