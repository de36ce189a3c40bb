"""Ray carries shards, results and errors as the inline executor does, and leaves the process as it was."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import OPENMP
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.execution.executor import InlineExecutor, make_executor
from pipeline.execution.placement import Placement
from pipeline.execution.ray_executor import SUBMITTED_JOB, WORKER_ENVIRONMENT, own_signals, worker_environment
from pipeline.execution.shard_progress import Done, ShardProgress
from pipeline.storage.receipts import Receipt
from pipeline.storage.tasks import ShardTask

ONE = Placement(1, 1, 0)


class Counting:
    """A worker that says how often it was called; it fails on some shards."""

    def __init__(self, start: int, progress: ShardProgress | None = None, seen: str = ""):
        self.calls, self.progress, self.seen = start, progress, Path(seen)

    def __call__(self, task: ShardTask) -> Receipt:
        self.calls += 1
        if self.progress:
            self.progress.begin(task)
            self.progress.add(task, 2, 30)
            wait_until(self.seen.exists)
        if task.index == 3:
            raise ConfigError("Three.", "here", "Take four.")
        if task.index == 5:
            raise ZeroDivisionError("five")
        return Receipt(task.index, "f", "", self.calls, os.getpid(), "", "", {}, {"tokens": 1.5})


class NotToBeMade:
    """A worker whose constructor fails, as an engine's may."""

    def __init__(self) -> None:
        raise EnvironmentFault("No engine.", "here", "Get one.")

    def __call__(self, task: ShardTask) -> Receipt:
        raise AssertionError("it was never made")


class Mortal:
    """A worker that some shards end: one is killed each time, one the first time, one hangs the first time."""

    def __init__(self, diary: str):
        self.diary = Path(diary)

    def __call__(self, task: ShardTask) -> Receipt:
        with self.diary.open("a") as file:
            file.write(f"{task.index}\n")
        first = self.diary.read_text().split().count(str(task.index)) == 1
        if task.index == 1 or (task.index == 2 and first):
            os.kill(os.getpid(), signal.SIGKILL)
        if task.index == 4 and first:
            time.sleep(120)
        return Receipt(task.index, "f", "", os.getpid(), 0, "", "")


def add(one: int, other: int) -> int:
    return one + other


def refuse() -> None:
    raise ConfigError("No.", "here", "Say yes.")


def die() -> None:
    os._exit(7)


def tasks(number: int, root: Path) -> deque[ShardTask]:
    shards = (str(root / "shards" / str(index)) for index in range(number))
    return deque(ShardTask(index, "source", "upstream", path, "quarantine", "f") for index, path in enumerate(shards))


def test_an_executor_of_another_name_is_refused():
    with pytest.raises(ConfigError, match="ray or inline"):
        make_executor("slurm")


def outcomes_are_as_promised(executor, root) -> None:
    given, again = tasks(7, root), tasks(1, root)
    found = {}
    for outcome in executor.map(Counting, {"start": 10}, given, ONE, 60):
        found[outcome.task.index] = outcome
        given.extend(again)  # whoever iterates may add to them
        again.clear()
    assert not given
    assert sorted(found) == list(range(7))
    assert isinstance(found[3].error, ConfigError) and found[3].error.fix == "Take four."
    assert "ZeroDivisionError: five" in found[5].traceback and found[5].error is None
    receipts = [found[index].receipt for index in (0, 1, 2, 4, 6)]
    assert [receipt.index for receipt in receipts] == [0, 1, 2, 4, 6]
    assert {receipt.stats["tokens"] for receipt in receipts} == {1.5}
    assert found[4].receipt.num_rows == 15, "one worker does them all"
    assert found[6].receipt.num_rows == 11, "after a defect there is a new one"
    assert progress_is_shown(executor, root)
    (failed,) = executor.map(NotToBeMade, {}, tasks(1, root), ONE, 60)
    assert isinstance(failed.error, EnvironmentFault) and failed.error.what == "No engine."
    assert executor.call(add, {"one": 1, "other": 2}, ONE) == 3
    with pytest.raises(ConfigError, match="Say yes"):
        executor.call(refuse, {}, ONE)


def progress_is_shown(executor, root) -> bool:
    """The worker goes on only when what it counted has been shown here."""
    shown, seen = [], root / f"{executor.name}-seen"

    def show() -> None:
        shown.append(progress.total())
        if shown[-1].amount == 30:
            seen.touch()

    progress = ShardProgress(root / "attempts", show)
    (outcome,) = executor.map(Counting, {"start": 0, "seen": str(seen)}, tasks(1, root), ONE, 60, progress)
    progress.drop(outcome.task)
    progress.close()
    return outcome.receipt is not None and seen.exists() and progress.total() == Done(0, 0)


def wait_until(happened: Callable[[], bool]) -> None:
    patience = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < patience
        time.sleep(0.05)


def test_inline_gives_every_outcome_and_raises_the_user_s_errors(tmp_path):
    outcomes_are_as_promised(InlineExecutor(), tmp_path)


class Expecting:
    """A worker that is told which shard follows."""

    def __init__(self, told: list[int | None]):
        self.told = told

    def expect(self, task: ShardTask | None) -> None:
        self.told.append(None if task is None else task.index)

    def __call__(self, task: ShardTask) -> Receipt:
        return Receipt(task.index, "f", "", 0, 0, "", "")


def test_a_worker_expects_the_next_shard_except_in_a_trial(tmp_path):
    told: list[int | None] = []
    given = tasks(4, tmp_path)
    given[1] = replace(given[1], rows=(0, 1))
    outcomes = list(InlineExecutor().map(Expecting, {"told": told}, given, ONE, 60))
    assert all(outcome.receipt for outcome in outcomes) and told == [1, None, 3, None]


@pytest.fixture
def stopping():
    """A handler of our own for SIGTERM, as `ends_well` sets one."""

    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    yield stop
    signal.signal(signal.SIGTERM, before)


def test_a_signal_that_comes_while_ray_starts_is_still_ours(stopping):
    with pytest.raises(KeyboardInterrupt), own_signals():
        signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(signum))  # as ray.init does
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert signal.getsignal(signal.SIGTERM) is stopping


def test_workers_find_our_environment_but_for_what_a_submitted_job_says_itself(monkeypatch):
    """Ray refuses a driver that names a variable that its job has named, even with the same value."""
    for name, value in OPENMP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(SUBMITTED_JOB, raising=False)
    assert worker_environment() == WORKER_ENVIRONMENT | OPENMP
    monkeypatch.setenv(SUBMITTED_JOB, json.dumps({"runtime_env": {"env_vars": {"OMP_WAIT_POLICY": "active"}}}))
    assert worker_environment() == WORKER_ENVIRONMENT | {"GOMP_SPINCOUNT": OPENMP["GOMP_SPINCOUNT"]}
    monkeypatch.setenv(SUBMITTED_JOB, json.dumps({"metadata": {}}))
    monkeypatch.delenv("GOMP_SPINCOUNT")
    assert worker_environment() == WORKER_ENVIRONMENT | {"OMP_WAIT_POLICY": OPENMP["OMP_WAIT_POLICY"]}


@pytest.mark.slow
def test_ray_does_the_same_in_other_processes_outlives_their_death_and_keeps_our_signal_handlers(tmp_path, monkeypatch):
    for name in WORKER_ENVIRONMENT:
        monkeypatch.setenv(name, "ours")

    def ours(signum: int, frame: object) -> None: ...

    before = {name: signal.signal(name, ours) for name in (signal.SIGTERM, signal.SIGINT)}
    executor = make_executor("ray")
    try:
        assert {signal.getsignal(name) for name in before} == {ours}
        assert executor.resources().cpus == len(os.sched_getaffinity(0))
        outcomes_are_as_promised(executor, tmp_path)
        assert executor.call(variables, {"names": list(WORKER_ENVIRONMENT)}, ONE) == WORKER_ENVIRONMENT
        assert {os.environ[name] for name in WORKER_ENVIRONMENT} == {"ours"}
        with pytest.raises(EnvironmentFault) as caught:
            executor.call(die, {}, ONE)
        assert "\n" not in str(caught.value)
        deaths_are_outlived(executor, tmp_path)
    finally:
        executor.close()
        for name, handler in before.items():
            signal.signal(name, handler)


def variables(names: list[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names}


def deaths_are_outlived(executor, root) -> None:
    """Each death is told with its shard, the others are done meanwhile, what is added is tried again."""
    given, deaths, done = tasks(6, root), Counter(), {}
    for outcome in executor.map(Mortal, {"diary": str(root / "diary")}, given, ONE, 3):
        if outcome.receipt:
            done[outcome.task.index] = outcome.receipt.num_rows
            continue
        deaths[outcome.task.index] += 1
        assert outcome.death and not outcome.error and not outcome.traceback
        if outcome.task.index == 4:
            assert "It hung" in outcome.death and "in __call__" in outcome.death, "it says where"
        if deaths[outcome.task.index] < 2:
            given.append(outcome.task)
    assert deaths == {1: 2, 2: 1, 4: 1} and sorted(done) == [0, 2, 3, 4, 5]
    assert list((root / "attempts").iterdir()) == []
    with pytest.raises(EnvironmentFault, match="worker died"):
        list(executor.map(Counting, {"start": Unreadable()}, tasks(1, root), ONE, 60))


class Unreadable:
    """An argument that no other process can load, so that a worker ends before it is given a shard."""

    def __reduce__(self):
        return die, ()
