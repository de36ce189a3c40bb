"""A killed Ray cluster ends its driver with exit 4; a killed driver ends its cluster."""

from __future__ import annotations

import os
import signal
import time
from collections import deque

import psutil
import pytest

from pipeline.execution.placement import Placement
from pipeline.execution.progress import ShardProgress
from pipeline.storage.shards import ShardTask
from tests.forks import FORKS, PATIENCE, has_ended

pytestmark = [pytest.mark.fault, pytest.mark.slow]


class Endless:
    """A worker that never finishes a shard."""

    def __init__(self, progress): ...

    def __call__(self, task, upcoming):
        time.sleep(PATIENCE)


def drive(root, line):
    """Run a driver that waits for a worker; send its cluster's process ids by name."""
    from pipeline.cli.ending import ends_well
    from pipeline.execution.ray_executor import RayExecutor

    os.environ.pop("RAY_ADDRESS", None)
    os.dup2(os.open(root / "said.txt", os.O_WRONLY | os.O_CREAT), 2)

    def story():
        executor = RayExecutor()
        children = psutil.Process().children(recursive=True)
        waiting = [{process.name(): process.pid for process in children}]
        progress = ShardProgress(root / "attempts", lambda: waiting and line.send(waiting.pop()))
        task = ShardTask(0, root / "shards" / "0", root / "quarantine", "f")
        try:
            list(executor.map(Endless, {}, deque([task]), Placement(1, 1, 0), progress))
        finally:
            executor.close()

    os._exit(ends_well(story))


@pytest.fixture
def driver(tmp_path):
    """A waiting driver, and its cluster's process ids."""
    line, theirs = FORKS.Pipe()
    process = FORKS.Process(target=drive, args=(tmp_path, theirs))
    process.start()
    assert line.poll(PATIENCE)
    yield process, line.recv()
    process.kill()


@pytest.mark.parametrize("killed", ["gcs_server", "raylet"])
def test_a_killed_cluster_ends_the_command_with_exit_4(driver, tmp_path, killed):
    process, cluster = driver
    os.kill(cluster[killed], signal.SIGKILL)
    process.join(PATIENCE)
    said = (tmp_path / "said.txt").read_text()
    assert process.exitcode == 4, said
    assert said.splitlines()[-1].startswith("error: The Ray cluster has died: ")
    assert "Traceback" not in said


def test_a_killed_driver_takes_its_cluster_with_it(driver):
    process, cluster = driver
    process.kill()
    process.join()
    until = time.monotonic() + PATIENCE
    while not (has_ended(cluster["gcs_server"]) and has_ended(cluster["raylet"])):
        assert time.monotonic() < until
        time.sleep(0.1)
