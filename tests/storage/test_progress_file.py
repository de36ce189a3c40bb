"""One process reads what another has written of its progress."""

from __future__ import annotations

import json

import pytest

from pipeline.storage import progress_file
from pipeline.storage.progress_file import ProgressFile


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

    monkeypatch.setattr(progress_file.time, "monotonic", lambda: Clock.now)
    return Clock


def test_a_report_within_half_a_second_is_left_out(tmp_path, clock):
    there, here = ProgressFile(tmp_path / "file"), ProgressFile(tmp_path / "file")
    for clock.now, seen in [(0.0, 0.0), (0.4, 0.0), (0.6, 0.6), (1.0, 0.6), (1.2, 1.2)]:
        there.write({"at": clock.now})
        assert here.read() == {"at": seen}
    there.write({"at": "once"}, at_once=True)
    assert here.read() == {"at": "once"}


def test_a_removed_file_says_nothing(tmp_path):
    file = ProgressFile(tmp_path / "file")
    file.write({"done": 1})
    for _ in range(2):
        file.remove()
        assert file.read() is None and list(tmp_path.iterdir()) == []


def test_a_file_that_is_being_written_says_nothing(tmp_path):
    whole = json.dumps({"part": "native", "done": 3})
    for length in range(len(whole)):
        (tmp_path / "file").write_text(whole[:length])
        assert ProgressFile(tmp_path / "file").read() is None


def test_a_disk_that_takes_no_more_stops_nothing(tmp_path):
    file = ProgressFile(tmp_path / "not" / "there")
    file.write({"done": 1})
    file.remove()
    assert file.read() is None
