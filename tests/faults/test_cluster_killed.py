"""A killed cluster ends its driver with one paragraph and exit 4, also behind Ray Client."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.execution.placement import Placement
from pipeline.execution.progress import ShardProgress
from pipeline.execution.ray_cluster import refusal
from pipeline.storage.shards import ShardTask
from tests.forks import FORKS, PATIENCE, has_ended

pytestmark = [pytest.mark.fault, pytest.mark.slow]


NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}


class Endless:
    """A worker that is never done."""

    def __init__(self, progress: ShardProgress): ...

    def __call__(self, task: ShardTask) -> Any:
        time.sleep(PATIENCE)


def drive(root: Path, line: Any, address: str) -> None:
    """A command that waits for a worker; then it sends the processes of its cluster, by name."""
    from pipeline.cli.ending import ends_well
    from pipeline.execution.ray_executor import RayExecutor

    os.environ.update(RAY_ADDRESS=address, RAY_CLIENT_RECONNECT_GRACE_PERIOD="2", **NO_TOKEN)
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


@contextlib.contextmanager
def driven(
    root: Path, address: str = "", attempts: int = 1
) -> Iterator[tuple[Any, dict[str, int]]]:
    """A driver that waits, and the processes of its cluster."""
    for _ in range(attempts):
        (root / "said.txt").unlink(missing_ok=True)
        line, theirs = FORKS.Pipe()
        process = FORKS.Process(target=drive, args=(root, theirs, address))
        process.start()
        theirs.close()
        assert line.poll(PATIENCE)
        with contextlib.suppress(EOFError):  # the driver ended before it had a worker
            processes = line.recv()
            break
    else:
        pytest.fail((root / "said.txt").read_text())
    yield process, processes
    process.kill()


@pytest.fixture
def driver(tmp_path):
    with driven(tmp_path) as found:
        yield found


@pytest.fixture
def head(tmp_path):
    """The process and the address of a head with a Ray Client server."""
    with socket.create_server(("127.0.0.1", 0)) as once:
        port = once.getsockname()[1]
    ray = Path(sys.executable).with_name("ray")
    options = [f"--ray-client-server-port={port}", "--port=0", "--num-cpus=1", "--block"]
    options += ["--include-dashboard=false"]
    with (
        (tmp_path / "head.txt").open("w") as said,
        subprocess.Popen(
            [ray, "start", "--head", *options], env=os.environ | NO_TOKEN, stdout=said, stderr=said
        ) as process,
    ):
        try:
            until = time.monotonic() + PATIENCE
            while refusal(f"127.0.0.1:{port}"):
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.1)
            yield process, f"ray://127.0.0.1:{port}"
        finally:
            kill_tree(process.pid)


def kill_tree(pid: int) -> None:
    if psutil.pid_exists(pid):
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


@pytest.mark.parametrize("killed", ["gcs_server", "raylet"])
def test_a_killed_cluster_ends_the_command_with_exit_4(driver, tmp_path, killed):
    process, cluster = driver
    os.kill(cluster[killed], signal.SIGKILL)
    assert_ended_with_a_paragraph(process, tmp_path)


def test_a_killed_head_behind_ray_client_ends_with_exit_4(head, tmp_path):
    server, address = head
    # Ray's proxy now and then loses the server that it has just started for a client.
    with driven(tmp_path, address, attempts=5) as (process, _):
        kill_tree(server.pid)
        assert_ended_with_a_paragraph(process, tmp_path)


def assert_ended_with_a_paragraph(process: Any, root: Path) -> None:
    process.join(PATIENCE)
    said = (root / "said.txt").read_text()
    assert process.exitcode == 4, said
    paragraph = said.splitlines()[-1]
    assert paragraph.startswith("error: The Ray cluster has died: ")
    assert "same command continues" in paragraph
    assert "Traceback" not in said


def test_a_killed_driver_takes_its_cluster_with_it(driver):
    process, cluster = driver
    process.kill()
    process.join()
    until = time.monotonic() + PATIENCE
    while not all(has_ended(cluster[name]) for name in ("gcs_server", "raylet")):
        assert time.monotonic() < until
        time.sleep(0.1)
