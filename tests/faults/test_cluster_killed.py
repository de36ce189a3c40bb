"""Parts of a run's own Ray cluster are killed: one paragraph and exit 4 in seconds; nothing outlives the driver."""

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


def drive(root: Path, line: Any, *, waits: bool) -> None:
    """A command that waits for a worker; it sends its cluster's processes then, and that it was told of its end."""
    from pipeline.cli.ending import ends_well
    from pipeline.errors import EnvironmentFault
    from pipeline.execution.ray_executor import RayExecutor

    said = root / "said.txt"
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)

    def story() -> None:
        executor = RayExecutor()
        import ray

        processes = ray._private.worker._global_node.all_processes
        pids = {name: found[0].process.pid for name, found in processes.items()}
        waiting = [pids | {"agents": executor._guard.agents}]
        progress = ShardProgress(root / "attempts", lambda: waiting and line.send(waiting.pop()))
        task = ShardTask(0, "source", "upstream", str(root / "shards" / "0"), "quarantine", "f")
        try:
            list(executor.map(Endless, {}, deque([task]), Placement(1, 1, 0), PATIENCE, progress))
        except EnvironmentFault:
            if waits:
                line.send("told")
                time.sleep(PATIENCE)
            raise
        finally:
            executor.close()

    code = ends_well(story)
    os._exit(code)


@pytest.fixture
def driver(tmp_path):
    """Starts a driver; returns it, its line, and the processes of its cluster."""
    started = []

    def start(waits: bool):
        line, theirs = FORKS.Pipe()
        process = FORKS.Process(target=drive, args=(tmp_path, theirs), kwargs={"waits": waits})
        process.start()
        started.append(process)
        assert line.poll(PATIENCE)
        return process, line, line.recv()

    yield start
    for process in started:
        process.kill()


def gone(pids: list[int]) -> bool:
    """Whether they end while a person would wait: Ray's agents by themselves take more than a minute."""
    patience = time.monotonic() + 20
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        if time.monotonic() > patience:
            return False
        time.sleep(0.1)
    return True


def test_a_killed_head_ends_the_command_with_exit_4_and_one_paragraph(driver, tmp_path):
    process, _, cluster = driver(waits=False)
    assert len(cluster["agents"]) >= 2, "two agents, and workers that wait for work"
    os.kill(cluster["gcs_server"], signal.SIGKILL)
    process.join(PATIENCE)
    said = (tmp_path / "said.txt").read_text()
    assert process.exitcode == 4, said
    (told,) = said.splitlines()
    assert (
        told.startswith("error: The Ray cluster has died: its head (the GCS at ") and "same command continues" in told
    )
    assert gone([cluster["raylet"], *cluster["agents"]])


def test_a_killed_scheduler_is_told_and_a_killed_driver_leaves_no_process_behind(driver, tmp_path):
    process, line, cluster = driver(waits=True)
    os.kill(cluster["raylet"], signal.SIGKILL)
    assert line.poll(PATIENCE) and line.recv() == "told"
    assert (tmp_path / "said.txt").read_text() == "", "no lines of Ray's own"
    process.kill()
    process.join()
    assert gone([cluster["gcs_server"], *cluster["agents"]])
