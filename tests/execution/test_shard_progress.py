"""What a worker counts in its own process is read in the driver's, and goes with its shard."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

from pipeline.execution import shard_progress
from pipeline.execution.shard_progress import Done, ShardProgress
from pipeline.storage.tasks import ShardTask


def task(index: int) -> ShardTask:
    return ShardTask(index, "source", "upstream", "shard", "quarantine", "f")


@pytest.fixture
def here(tmp_path, monkeypatch) -> ShardProgress:
    monkeypatch.setattr(shard_progress, "SECONDS_BETWEEN_REPORTS", 0.0)
    monkeypatch.setattr(shard_progress.threading, "Timer", AtOnce)
    return ShardProgress(tmp_path / "attempts", lambda: None)


class AtOnce:
    """A timer whose time is up."""

    def __init__(self, seconds: float, act: Callable[[], None]):
        self.start = act


def in_a_worker(progress: ShardProgress) -> ShardProgress:
    return pickle.loads(pickle.dumps(progress))


def test_several_workers_counts_are_summed_until_their_shards_are_committed(here, tmp_path):
    one, other = in_a_worker(here), in_a_worker(here)
    one.begin(task(0))
    other.begin(task(1))
    one.add(task(0), 0, 12)
    one.add(task(0), 1, 0)
    other.add(task(1), 2, 30)
    one.begin(task(2))  # its conversations take the places that are free
    one.add(task(2), 0, 5)
    assert here.total() == Done(0, 0)
    here.poll()
    assert here.total() == Done(3, 47)
    here.drop(task(1))
    here.poll()
    assert here.total() == Done(1, 17)
    here.close()
    assert list(tmp_path.rglob("*.*")) == []


def test_what_is_counted_in_one_moment_is_written_a_moment_later_and_not_after_the_shard_s_end(tmp_path, monkeypatch):
    timers = []

    class Timer(AtOnce):
        def __init__(self, seconds, act):
            timers.append(act)
            self.start = lambda: None

    monkeypatch.setattr(shard_progress.threading, "Timer", Timer)
    here = ShardProgress(tmp_path / "attempts", lambda: None)
    worker = in_a_worker(here)
    worker.begin(task(0))
    for _ in range(5):  # answers that end in the same step
        worker.add(task(0), 1, 3)
    (write,) = timers
    write()
    here.poll()
    assert here.total() == Done(5, 15)
    worker.add(task(0), 1, 3)
    worker.end(task(0))
    here.drop(task(0))
    timers[1]()
    assert list((tmp_path / "attempts").iterdir()) == [], "no file of a committed shard"


def test_a_shard_that_begins_anew_counts_from_nothing(here):
    worker = in_a_worker(here)
    for _ in range(2):
        worker.begin(task(0))
        worker.add(task(0), 4, 9)
    here.poll()
    assert here.total() == Done(4, 9)


def test_a_trial_of_some_rows_is_not_counted(here):
    trial = replace(task(0), rows=(2, 3))
    here.begin(trial)
    here.add(trial, 1, 1)
    assert here.total() == Done(0, 0)


@pytest.mark.parametrize("written", ["", "[3, ", "[3]", "[1, 2, 3]", "{}", "null", "[null, 2]", "\xff"])
def test_a_file_that_is_half_written_says_what_it_said_before(here, written):
    worker = in_a_worker(here)
    worker.begin(task(7))
    worker.add(task(7), 1, 8)
    here.poll()
    (file,) = here.folder.iterdir()
    file.write_bytes(written.encode("latin-1"))
    here.poll()
    assert here.total() == Done(1, 8)


def test_a_disk_that_takes_no_more_stops_nothing(tmp_path):
    (tmp_path / "file").touch()
    worker = in_a_worker(ShardProgress(tmp_path / "file" / "attempts"))
    worker.begin(task(0))
    worker.add(task(0), 1, 1)
