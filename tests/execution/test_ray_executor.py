"""Ray and inline executors return the same results, errors and progress."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter, deque
from dataclasses import replace
from unittest.mock import Mock

import pytest
import ray

from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.execution.executor import InlineExecutor, make_executor
from pipeline.execution.placement import Placement
from pipeline.execution.progress import ShardProgress
from pipeline.execution.ray_cluster import WORKER_ENVIRONMENT, own_signals
from pipeline.storage.receipts import Receipt
from pipeline.storage.shards import ShardTask

ONE = Placement(1, 1, 0)
STOPS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def signal_handlers():
    """Let signals interrupt a test as Ctrl-C does, and restore their handlers."""
    handlers = {signum: signal.signal(signum, signal.default_int_handler) for signum in STOPS}
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


class Worker:
    """A worker whose receipts count its calls; shards 3 and 5 make it fail."""

    def __init__(self, calls=0, expected=None):
        self.calls, self.expected = calls, [] if expected is None else expected

    def __call__(self, task, upcoming):
        self.calls += 1
        self.expected.append(upcoming and upcoming.index)
        if task.index == 3:
            refuse()
        if task.index == 5:
            raise ZeroDivisionError("five")
        return Receipt(task.index, "f", "", self.calls, 0, "", "", {}, {"tokens": 1.5})


class Reporting(Worker):
    """A worker that reports progress until the progress has been shown."""

    def __init__(self, progress, shown):
        super().__init__()
        self.progress, self.shown = progress, shown

    def __call__(self, task, upcoming):
        self.progress.begin(task)
        while not self.shown.exists():
            self.progress.update(task, 0, 1)
            time.sleep(0.05)
        return super().__call__(task, upcoming)


class Mortal(Worker):
    """A worker that is killed by shard 1, and once by shard 2."""

    def __init__(self, diary):
        super().__init__()
        self.diary = diary

    def __call__(self, task, upcoming):
        with self.diary.open("a") as file:
            file.write(f"{task.index}\n")
        first = self.diary.read_text().split().count(str(task.index)) == 1
        if task.index == 1 or (task.index == 2 and first):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(replace(task, index=0), upcoming)


class Unreadable:
    """An argument that ends the process that unpickles it."""

    def __reduce__(self):
        return die, ()


def refuse():
    raise ConfigError("No.", "here", "Say yes.")


def die():
    os._exit(7)


def tasks(number, root):
    path = root / "shards"
    return deque(ShardTask(index, path / str(index), path, "f") for index in range(number))


def assert_results_are_right(executor, root):
    given, again, found = tasks(7, root), tasks(1, root), {}
    for outcome in executor.map(Worker, {"calls": 10}, given, ONE):
        found[outcome.task.index] = outcome
        given.extend(again)  # whoever iterates may add to them
        again.clear()
    assert sorted(found) == list(range(7)) and not given
    assert isinstance(found[3].error, ConfigError) and found[3].error.fix == "Say yes."
    assert "ZeroDivisionError: five" in found[5].traceback and found[5].error is None
    # one worker does them all; after a defect there is a new one
    assert (found[4].receipt.num_rows, found[6].receipt.num_rows) == (15, 11)
    assert found[6].receipt.stats == {"tokens": 1.5}
    (failed,) = executor.map(refuse, {}, tasks(1, root), ONE)  # as a constructor may
    assert isinstance(failed.error, ConfigError)
    with pytest.raises(ConfigError, match="Say yes"):
        executor.call(refuse, {}, ONE)


def assert_progress_is_shown(executor, root):
    def show():
        if progress.total()["tokens"]:
            (root / "shown").touch()

    (root / "attempts").mkdir()
    progress = ShardProgress(root / "attempts", show)
    (outcome,) = executor.map(Reporting, {"shown": root / "shown"}, tasks(1, root), ONE, progress)
    assert outcome.receipt


def assert_deaths_are_outlived(executor, root):
    """Check that each death names its shard and that failed shards are tried again."""
    given, deaths, done = tasks(6, root), Counter(), set()
    for outcome in executor.map(Mortal, {"diary": root / "diary"}, given, ONE):
        index = outcome.task.index
        if outcome.receipt:
            done.add(index)
            continue
        deaths[index] += 1
        if deaths[index] < 2:
            given.append(outcome.task)
    assert deaths == {1: 2, 2: 1} and done == {0, 2, 3, 4, 5}
    with pytest.raises(EnvironmentFault, match="worker died"):
        list(executor.map(Worker, {"calls": Unreadable()}, tasks(1, root), ONE))
    with pytest.raises(EnvironmentFault) as caught:
        executor.call(die, {}, ONE)
    assert "\n" not in str(caught.value)


def test_inline_gives_results_errors_and_progress(tmp_path):
    assert_results_are_right(InlineExecutor(), tmp_path)
    assert_progress_is_shown(InlineExecutor(), tmp_path)


@pytest.mark.slow
def test_ray_does_the_same_and_outlives_dead_workers(tmp_path, monkeypatch, capfd):
    for name in WORKER_ENVIRONMENT:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    executor = make_executor("ray")
    try:
        assert {signal.getsignal(signum) for signum in STOPS} == {signal.default_int_handler}
        assert executor.resources().cpus == len(os.sched_getaffinity(0))
        monkeypatch.setattr(ray, "remote", Mock(wraps=ray.remote))
        assert_results_are_right(executor, tmp_path)
        assert ray.remote.call_count == 3  # one for each worker that starts
        assert_progress_is_shown(executor, tmp_path)
        for name, value in WORKER_ENVIRONMENT.items():
            assert executor.call(os.getenv, {"key": name}, ONE) == value
        assert "".join(capfd.readouterr()) == "", "Ray says nothing"
        assert_deaths_are_outlived(executor, tmp_path)
    finally:
        executor.close()


def test_a_worker_expects_the_next_shard_except_in_trials(tmp_path):
    expected: list[int | None] = []
    given = tasks(3, tmp_path)
    given[1] = replace(given[1], rows=(0, 1))
    list(InlineExecutor().map(Worker, {"expected": expected}, given, ONE))
    assert expected == [1, None, None]


def test_a_signal_while_ray_starts_is_still_ours():
    with pytest.raises(KeyboardInterrupt), own_signals():
        signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(signum))  # as ray.init
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
