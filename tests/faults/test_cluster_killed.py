"""The head or the scheduler of a run's own Ray cluster is killed: one paragraph and exit 4 within
seconds.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.execution.placement import Placement
from pipeline.execution.shard_progress import ShardProgress
from pipeline.storage.tasks import ShardTask
from tests.forks import FORKS, PATIENCE

pytestmark = [pytest.mark.fault, pytest.mark.slow]


class Endless:
    """A worker that is never done."""

    def __init__(self, progress: ShardProgress): ...

    def __call__(self, task: ShardTask) -> Any:
        time.sleep(PATIENCE)


def drive(root: Path, line: Any) -> None:
    """A command that waits for a worker; it sends its cluster's processes then, by their names."""
    from pipeline.cli.ending import ends_well
    from pipeline.execution.ray_executor import RayExecutor

    said = root / "said.txt"
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)

    def story() -> None:
        executor = RayExecutor()
        processes = {
            process.name(): process.pid for process in psutil.Process().children(recursive=True)
        }
        waiting = [processes]
        progress = ShardProgress(root / "attempts", lambda: waiting and line.send(waiting.pop()))
        task = ShardTask(0, "source", "upstream", str(root / "shards" / "0"), "quarantine", "f")
        try:
            list(executor.map(Endless, {}, deque([task]), Placement(1, 1, 0), PATIENCE, progress))
        finally:
            executor.close()

    code = ends_well(story)
    os._exit(code)


@pytest.fixture
def driver(tmp_path):
    """A driver that waits, and the processes of its cluster."""
    line, theirs = FORKS.Pipe()
    process = FORKS.Process(target=drive, args=(tmp_path, theirs))
    process.start()
    assert line.poll(PATIENCE)
    yield process, line.recv()
    process.kill()


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("killed", ["gcs_server", "raylet"])
def test_a_killed_cluster_ends_the_command_with_exit_4(driver, tmp_path, killed):
    process, cluster = driver
    os.kill(cluster[killed], signal.SIGKILL)
    process.join(PATIENCE)
    said = (tmp_path / "said.txt").read_text()
    assert process.exitcode == 4, said
    paragraph = said.splitlines()[-1]
    assert (
        paragraph.startswith("error: The Ray cluster has died: ")
        and "same command continues" in paragraph
    )
    assert "Traceback" not in said


def test_a_killed_driver_takes_its_cluster_with_it(driver):
    process, cluster = driver
    process.kill()
    process.join()
    until = time.monotonic() + PATIENCE
    while not all(has_ended(cluster[name]) for name in ("gcs_server", "raylet")):
        assert time.monotonic() < until
        time.sleep(0.1)
