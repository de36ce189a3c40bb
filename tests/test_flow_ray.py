"""Through Ray and Ray Train the flow makes what it makes in one process, and stops as politely.

However many workers share the work, the rows are the same. Training's loss is, but for the order of its sums:
tests/training/test_own_method.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from pipeline.cli.app import main
from pipeline.flow import run_flow
from pipeline.stages import features
from pipeline.storage.receipts import Receipt
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.tasks import ShardTask
from tests.flows.tiny import SHARDED, contents, last_events, run_again, shards_made, stages_run
from tests.forks import FORKS, PATIENCE

WORKERS = 2


class Together(features.Worker):
    """A worker that begins once as many as there are to be have come, each in its own process."""

    def __call__(self, task: ShardTask) -> Receipt:
        come = Path(task.shard).parents[2] / "come"
        come.mkdir(exist_ok=True)
        (come / str(os.getpid())).touch()
        patience = time.monotonic() + 600
        while len(list(come.iterdir())) < WORKERS:
            assert time.monotonic() < patience, "some workers never came"
            time.sleep(0.02)
        return super().__call__(task)


def stop_when(happened: Callable[[], bool], config: Path, sent: int, cluster: str = "") -> tuple[int, str]:
    """Run until something has happened, then signal as a terminal does; how it ended, and what it said on stderr.

    Without a `cluster`, which RAY_ADDRESS then names, the run starts its own.
    """
    said = config.with_name(f"said-{sent}.txt")
    process = FORKS.Process(target=run_in_a_session, args=(config, said, cluster))
    process.start()
    patience = time.monotonic() + 300
    while not happened():
        assert process.is_alive() and time.monotonic() < patience
        time.sleep(0.05)
    (os.killpg if sent == signal.SIGINT else os.kill)(process.pid, sent)
    process.join(PATIENCE)
    return process.exitcode, said.read_text()


def run_in_a_session(config: Path, said: Path, cluster: str) -> None:
    """The command line as a terminal runs it; what it says on stderr goes to `said`."""
    os.setsid()
    features.Worker = Together
    if cluster:
        os.environ["RAY_ADDRESS"] = cluster
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    sys.argv = ["medusa-distill", "run", str(config)]
    main()


@pytest.mark.slow
@pytest.mark.fault
def test_a_ray_run_is_stopped_by_sigterm_and_by_ctrl_c_and_goes_on_to_what_the_inline_run_made(
    ray_cluster, finished_run, make_settings, make_config, tmp_path
):
    import ray

    workers = {f"placement__{stage}": {"workers": WORKERS} for stage in ("generate", "features")}
    changes = {"train__checkpoint_every": 1, "train__epochs": 30, **workers}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(make_settings(tmp_path, **changes)))
    run = RunDirectory(tmp_path / "run")

    def generated() -> bool:
        return (run.path / "events.jsonl").exists() and ("generate", 0) in shards_made(run)

    def in_training() -> bool:
        stage = run.latest("train")
        return stage is not None and len(list(stage.path.glob("checkpoints/step-*.safetensors"))) > 0

    code, said = stop_when(generated, config, signal.SIGTERM, ray.get_runtime_context().gcs_address)
    assert code == 143, said
    assert "stopped: Stopped (SIGTERM)" in said and "the same command continues" in said and "Traceback" not in said
    assert "run-finished" not in {event["event"] for event in last_events(run)}
    stopped_with = {("generate", index) for index in run.latest("generate").receipts()}
    assert stopped_with

    code, said = stop_when(in_training, config, signal.SIGINT)
    assert code == 130, said
    assert "stopped: Stopped (SIGINT)" in said and "the same command continues" in said and "Traceback" not in said
    assert not stopped_with & set(shards_made(run))
    assert run.latest("train").done is None and list(run.latest("train").path.glob("checkpoints/step-*"))

    config = make_config(tmp_path, **changes)
    run = run_flow(config, console=Console(quiet=True))
    assert stages_run(run) == ["train", "calibrate", "export", "check"]
    reference = run_again(make_config(tmp_path, run__name="reference", **changes), until="train")
    assert len(list((run.path / "come").iterdir())) == WORKERS
    assert contents(run, *SHARDED) == contents(finished_run, *SHARDED)
    ours, theirs = (load_file(of.path / "latest/train/heads.safetensors") for of in (run, reference))
    assert all(torch.allclose(ours[name], tensor, atol=1e-5) for name, tensor in theirs.items())
    assert run.latest("check").summary["passed"]
    assert all(run.latest(name).verify() == [] for name in ("generate", "features", "train", "export"))
