"""However many workers share the work, the rows are the same.

Training's loss is, but for the order of its sums: tests/training/test_own_method.py.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.flow import run_flow
from pipeline.stages import features, generate
from pipeline.storage.receipts import Receipt
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.tasks import ShardTask
from tests.flows.tiny import SHARDED, contents, latest

pytestmark = [pytest.mark.slow, pytest.mark.fault]


class Together:
    """A worker that begins once as many as the run's file `workers` says have come, each in its own process."""

    def __call__(self, task: ShardTask) -> Receipt:
        run = Path(task.shard).parents[2]
        come = run / f"come-to-{Path(task.shard).parents[1].name}"
        come.mkdir(exist_ok=True)
        (come / str(os.getpid())).touch()
        patience = time.monotonic() + 600
        while len(list(come.iterdir())) < int((run / "workers").read_text()):
            assert time.monotonic() < patience, "some workers never came"
            time.sleep(0.02)
        return super().__call__(task)  # type: ignore[misc]


class Generator(Together, generate.Worker):
    pass


class Featurer(Together, features.Worker):
    pass


def test_two_workers_make_the_rows_that_one_process_makes(
    ray_cluster, finished_run, make_config, tmp_path, monkeypatch
):
    """Two share four shards; that one does so through Ray: tests/test_flow_ray.py."""
    workers = 2
    monkeypatch.setattr(generate, "Worker", Generator)
    monkeypatch.setattr(features, "Worker", Featurer)
    placement = {f"placement__{stage}": {"workers": workers} for stage in ("generate", "features")}
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    (run.path / "workers").write_text(str(workers))
    run_flow(make_config(tmp_path, **placement), until="features", executor="ray", console=Console(quiet=True))
    for stage in ("generate", "features"):
        assert len(list((run.path / f"come-to-{latest(run, stage).path.name}").iterdir())) == workers
    assert contents(run, *SHARDED) == contents(finished_run, *SHARDED)
