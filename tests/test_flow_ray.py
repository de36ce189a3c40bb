"""Through Ray and Ray Train the flow makes what it makes in one process, stops as politely, and
outlives its workers.

However many workers share the work, the rows are the same, and training's loss is, but for the
order of its sums; their number changes within the training. The training is by a method that only
these tests know: heads alone, at a fixed learning rate.
"""

from __future__ import annotations

import functools
import os
import shutil
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

from pipeline.artifacts.trained_heads import HEADS_FILE
from pipeline.cli.app import main
from pipeline.flow import run_flow
from pipeline.stages import features, generate
from pipeline.storage.run_directory import RunDirectory
from pipeline.training import ray_entry
from pipeline.training.methods import METHODS
from pipeline.training.metrics import read_metrics
from tests.faults.workers import (
    STEPS_BEFORE_DEATH,
    WORKERS,
    HangsAfterOne,
    Together,
    train_and_be_killed,
)
from tests.flows.tiny import (
    SHARDED,
    contents,
    last_events,
    latest,
    run_again,
    shards_made,
    stages_run,
)
from tests.forks import FORKS, PATIENCE
from tests.training.own_method import FixedRate

TRAINING = {
    "train__method": FixedRate.name,
    "train__lr": 3e-3,
    "train__epochs": 10,
    "train__checkpoint_every": 1,
}


def stop_when(
    happened: Callable[[], bool], config: Path, sent: signal.Signals, cluster: str = ""
) -> None:
    """Run until something has happened, then signal as a terminal does: the run ends politely.

    Without a `cluster`, which RAY_ADDRESS then names, the run starts its own. In a `cluster` its
    second shard hangs.
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
    text = said.read_text()
    assert process.exitcode == 128 + sent, text
    assert f"Stopped by {sent.name}." in text and "same command continues" in text
    assert "Traceback" not in text


def run_in_a_session(config: Path, said: Path, cluster: str) -> None:
    """The command line as a terminal runs it; what it says on stderr goes to `said`."""
    os.setsid()
    features.Worker = functools.partial(Together, features.NAME)
    METHODS[FixedRate.name] = FixedRate()
    if cluster:
        generate.Worker = HangsAfterOne
        os.environ["RAY_ADDRESS"] = cluster
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    sys.argv = ["medusa-distill", "run", str(config)]
    main()


def curve_of(run: RunDirectory) -> list[tuple[int, float, float]]:
    """Step, learning rate and loss."""
    lines = read_metrics(latest(run, "train").path)
    return [(line["step"], line["lr"], line["loss"]) for line in lines if "loss" in line]


def assert_trained_as_in_one_process(
    run: RunDirectory, finished_run: RunDirectory, make_config
) -> None:
    """The same curve and heads as of a training from the same cache that nothing disturbs."""
    root = run.path.parent
    shutil.copytree(finished_run.path, root / "whole", symlinks=True)
    whole = run_again(make_config(root, run__name="whole", **TRAINING), until="train")
    assert stages_run(whole) == ["train"]
    expected, found = curve_of(whole), curve_of(run)
    assert [step for step, _, _ in found] == [step for step, _, _ in expected] and len(found) >= 8
    assert {lr for _, lr, _ in found} == {TRAINING["train__lr"]} and found[-1][-1] < found[0][-1]
    # Sums of float32 in another order: 1e-7 at each of the dozen steps, with room for it to grow
    # from step to step.
    assert [loss for *_, loss in found] == pytest.approx([loss for *_, loss in expected], rel=1e-5)
    made, reference = latest(run, "train"), latest(whole, "train")
    assert {name: made.summary[name] for name in ("steps", "tokens")} == {
        name: reference.summary[name] for name in ("steps", "tokens")
    }
    ours, theirs = (load_file(stage.path / HEADS_FILE) for stage in (made, reference))
    assert all(torch.allclose(ours[name], tensor, atol=1e-4) for name, tensor in theirs.items())


@pytest.mark.slow
@pytest.mark.fault
def test_an_interrupted_ray_run_equals_the_inline_run(
    ray_cluster, finished_run, make_settings, make_config, tmp_path, monkeypatch
):
    import ray

    monkeypatch.setitem(METHODS, FixedRate.name, FixedRate())
    alone, shared = {"workers": 1}, {"workers": WORKERS}
    placement = {"placement__generate": alone, "placement__features": shared}
    trains_alone = {**TRAINING, **placement, "placement__train": alone}
    trains_shared = {**TRAINING, **placement, "placement__train": shared}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(make_settings(tmp_path, **trains_alone)))
    (tmp_path / "finished.txt").write_text(str(latest(finished_run, "generate").path))
    run = RunDirectory(tmp_path / "run")

    def generated() -> bool:
        return (run.path / "events.jsonl").exists() and ("generate", 0) in shards_made(run)

    def in_training() -> bool:
        stage = run.latest("train")
        return (
            stage is not None and len(list(stage.path.glob("checkpoints/step-*.safetensors"))) > 0
        )

    stop_when(generated, config, signal.SIGTERM, ray.get_runtime_context().gcs_address)
    assert "run-finished" not in {event["event"] for event in last_events(run)}
    assert list(run.latest("generate").receipts()) == [0]

    stop_when(in_training, config, signal.SIGINT)
    assert ("generate", 0) not in shards_made(run) and ("generate", 3) in shards_made(run)
    assert run.latest("train").done is None
    assert len(list((run.path / "come").iterdir())) == WORKERS
    assert contents(run, *SHARDED) == contents(finished_run, *SHARDED)

    monkeypatch.setattr(ray_entry, "train_on_ray", train_and_be_killed)
    run = run_flow(make_config(tmp_path, **trains_shared), console=Console(quiet=True))
    assert stages_run(run) == ["train", "calibrate", "export", "check"]
    assert run.latest("check").summary["passed"]
    assert all(
        run.latest(name).verify() == [] for name in ("generate", "features", "train", "export")
    )

    processes = (tmp_path / "trainer.txt").read_text().split()
    before, after = STEPS_BEFORE_DEATH + 1, len(processes) - STEPS_BEFORE_DEATH - 1
    assert 0 < after < latest(run, "train").summary["steps"], "it did not begin again"
    assert processes[:before] == processes[:1] * before and processes[0] not in processes[before:]
    deaths = [event for event in last_events(run) if event["event"] == "worker-died"]
    assert {event["stage"] for event in deaths} == {"train"} and len(deaths) <= 2, (
        "the other fails with its neighbour"
    )
    assert not (latest(run, "train").path / "ray").exists()
    assert_trained_as_in_one_process(run, finished_run, make_config)
