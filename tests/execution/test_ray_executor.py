"""Ray carries shards, results and errors as the inline executor does, and leaves the process as it was."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.execution.executor import InlineExecutor, make_executor
from pipeline.execution.placement import Placement
from pipeline.execution.ray_executor import own_signals
from pipeline.storage.shards import Receipt
from pipeline.storage.stage_directory import ShardTask

ONE = Placement(1, 1, 0)


class Counter:
    """A worker that says how often it was called; it fails on some shards."""

    def __init__(self, start: int):
        self.calls = start

    def __call__(self, task: ShardTask) -> Receipt:
        self.calls += 1
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


class Dying:
    """A worker that one shard kills, as when it takes more memory than there is."""

    def __init__(self, log: str):
        self.log = log

    def __call__(self, task: ShardTask) -> Receipt:
        if task.index == 1:
            with open(self.log, "a") as file:
                file.write("1\n")
            os._exit(9)
        return Receipt(task.index, "f", "", 0, 0, "", "")


def add(one: int, other: int) -> int:
    return one + other


def refuse() -> None:
    raise ConfigError("No.", "here", "Say yes.")


def die() -> None:
    os._exit(7)


def tasks(number: int) -> list[ShardTask]:
    return [ShardTask(index, "source", "upstream", "shard", "quarantine", "f") for index in range(number)]


def test_an_executor_of_another_name_is_refused():
    with pytest.raises(ConfigError, match="ray or inline"):
        make_executor("slurm", 3)


def outcomes_are_as_promised(executor) -> None:
    found = {outcome.index: outcome for outcome in executor.map(Counter, {"start": 10}, tasks(7), ONE)}
    assert sorted(found) == list(range(7))
    assert isinstance(found[3].error, ConfigError) and found[3].error.fix == "Take four."
    assert "ZeroDivisionError: five" in found[5].traceback and found[5].error is None
    receipts = [found[index].receipt for index in (0, 1, 2, 4, 6)]
    assert [receipt.index for receipt in receipts] == [0, 1, 2, 4, 6]
    assert {receipt.stats["tokens"] for receipt in receipts} == {1.5}
    assert sorted(receipt.num_rows for receipt in receipts)[-1] > 14, "one worker does them all"
    (failed,) = executor.map(NotToBeMade, {}, tasks(1), ONE)
    assert isinstance(failed.error, EnvironmentFault) and failed.error.what == "No engine."
    assert executor.call(add, {"one": 1, "other": 2}, ONE) == 3
    with pytest.raises(ConfigError, match="Say yes"):
        executor.call(refuse, {}, ONE)


def test_inline_gives_every_outcome_and_raises_the_user_s_errors():
    outcomes_are_as_promised(InlineExecutor())


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


@pytest.mark.slow
def test_ray_does_the_same_in_other_processes_outlives_their_death_and_keeps_our_signal_handlers(tmp_path):
    def ours(signum: int, frame: object) -> None: ...

    before = {name: signal.signal(name, ours) for name in (signal.SIGTERM, signal.SIGINT)}
    executor = make_executor("ray", max_failures=2)
    try:
        assert {signal.getsignal(name) for name in before} == {ours}
        assert executor.resources().cpus == len(os.sched_getaffinity(0))
        outcomes_are_as_promised(executor)
        with pytest.raises(EnvironmentFault) as caught:
            executor.call(die, {}, ONE)
        assert "\n" not in str(caught.value)
        deaths = tmp_path / "deaths"
        with pytest.raises(EnvironmentFault) as caught:
            list(executor.map(Dying, {"log": str(deaths)}, tasks(3), ONE))
        assert "\n" not in str(caught.value)
        assert deaths.read_text() == "1\n" * 2, "it is tried again, and as often as the limit says"
    finally:
        executor.close()
        for name, handler in before.items():
            signal.signal(name, handler)
