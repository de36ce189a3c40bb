"""What a worker counts in its own process is read in the driver's, and goes with its shard."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from pipeline.execution import shard_progress
from pipeline.execution.shard_progress import Done, ShardProgress
from pipeline.storage import progress_file
from pipeline.storage.tasks import ShardTask


def task(index: int) -> ShardTask:
    return ShardTask(index, "source", "upstream", "shard", "quarantine", "f")


@pytest.fixture
def here(tmp_path, monkeypatch) -> ShardProgress:
    for module in (shard_progress, progress_file):
        monkeypatch.setattr(module, "SECONDS_BETWEEN_REPORTS", 0.0)
    return ShardProgress(tmp_path, lambda: None)


def in_a_worker(progress: ShardProgress) -> ShardProgress:
    return pickle.loads(pickle.dumps(progress))


def test_workers_counts_are_summed_until_their_shards_are_dropped(here, tmp_path):
    one, other = in_a_worker(here), in_a_worker(here)
    for worker, index, conversations, amount in [
        (one, 0, 1, 12),
        (other, 1, 2, 30),
        (one, 2, 0, 5),
    ]:
        worker.begin(task(index))
        worker.add(task(index), 0, amount)
        worker.add(task(index), conversations, 0)
    assert not here.begun
    here.poll()
    assert here.begun and here.total() == Done(3, 47)
    here.drop(task(1))
    here.poll()
    assert here.total() == Done(1, 17)
    here.close()
    assert list(tmp_path.iterdir()) == []


def test_a_trial_of_some_rows_is_not_counted(here):
    trial = replace(task(0), rows=(2, 3))
    for begun in (trial, task(0)):
        here.begin(begun)
        here.add(trial, 1, 1)
    assert here.total() == Done(0, 0)


def test_a_shard_that_begins_anew_counts_from_nothing(here, tmp_path):
    worker = in_a_worker(here)
    for _ in range(2):
        worker.begin(task(7))
        worker.add(task(7), 4, 9)
    here.poll()
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:-1])  # it is being written again
    here.poll()
    assert here.total() == Done(4, 9)
