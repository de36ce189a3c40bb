"""Progress is a plain line now and then where nobody watches a terminal."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pipeline.execution import progress
from pipeline.execution.progress import Meter, duration


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
        "features: 4 of 10 shards, 1 min 0 s left, 5 tokens/s",
        "features: 6 of 10 shards, 40 s left, 5 tokens/s",
        "features: 8 of 10 shards, 20 s left, 5 tokens/s",
        "features: 10 of 10 shards, 0 s left, 5 tokens/s",
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


@given(st.floats(0, 1e6))
def test_a_duration_is_within_its_last_unit(seconds):
    words = duration(seconds).split()
    sizes = {"s": 1, "min": 60, "h": 3600}
    said = sum(int(number) * sizes[unit] for number, unit in zip(words[::2], words[1::2], strict=True))
    assert abs(said - seconds) <= (60 if "h" in words else 0.5)
