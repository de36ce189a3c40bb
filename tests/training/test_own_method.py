"""A method that only these tests know: heads alone, at a fixed learning rate. It trains, and resumes, through Ray."""

from __future__ import annotations

import shutil

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from pipeline.artifacts.trained_heads import HEADS_FILE
from pipeline.flow import run_flow
from pipeline.storage.run_directory import RunDirectory
from pipeline.training import ray_entry
from pipeline.training.heads_only import HeadsLearner
from pipeline.training.methods import METHODS, HeadsOnly
from pipeline.training.metrics import read_metrics
from tests.faults.unfinished import cut_before
from tests.faults.workers import STEPS_BEFORE_DEATH, train_and_be_killed
from tests.flows.tiny import last_events, latest, run_again, stages_run


class FixedRateLearner(HeadsLearner):
    def lr_share(self, step: int) -> float:
        return 1.0


class FixedRate(HeadsOnly):
    name = "fixed-rate"

    def phases(self, train):
        return [("", FixedRateLearner)]


def curve_of(run: RunDirectory) -> list[tuple[int, float, float]]:
    lines = read_metrics(latest(run, "train").path)
    return [(line["step"], line["lr"], line["loss"]) for line in lines if "loss" in line]


@pytest.mark.slow
@pytest.mark.fault
def test_a_method_of_our_own_trains_on_two_workers_of_which_one_is_killed_as_on_one(
    ray_cluster, finished_run, copied_run, make_config, tmp_path, monkeypatch
):
    """The two have a part of the heads each, and of their checkpoints."""
    monkeypatch.setitem(METHODS, FixedRate.name, FixedRate())
    changes = {"train__method": FixedRate.name, "train__lr": 3e-3, "train__epochs": 4, "train__checkpoint_every": 1}
    cut_before(copied_run, "train")
    shutil.copytree(copied_run.path, tmp_path / "whole", symlinks=True)
    whole = run_again(make_config(tmp_path, run__name="whole", **changes), until="train")
    assert stages_run(whole) == ["train"]
    monkeypatch.setattr(ray_entry, "train_on_ray", train_and_be_killed)
    config = make_config(tmp_path, placement__train={"workers": 2}, train__shard_heads=True, **changes)
    run = run_flow(config, until="train", executor="ray", console=Console(quiet=True))

    processes = (tmp_path / "trainer.txt").read_text().split()
    before, after = STEPS_BEFORE_DEATH + 1, len(processes) - STEPS_BEFORE_DEATH - 1
    assert processes[:before] == processes[:1] * before and processes[0] not in processes[before:]
    expected, found = curve_of(whole), curve_of(run)
    assert 0 < after < len(expected), "it did not begin again"
    deaths = [event for event in last_events(run) if event["event"] == "worker-died"]
    assert {event["stage"] for event in deaths} == {"train"} and len(deaths) <= 2, "the other fails with its neighbour"
    assert [step for step, _, _ in found] == [step for step, _, _ in expected] and len(found) >= 8
    assert {lr for _, lr, _ in found} == {3e-3}
    # Sums of float32 in another order: 1e-7 at each of the dozen steps, with room for it to grow from step to step.
    assert [loss for *_, loss in found] == pytest.approx([loss for *_, loss in expected], rel=1e-5)
    assert found[-1][-1] < found[0][-1]
    made, reference = latest(run, "train"), latest(whole, "train")
    assert {name: made.summary[name] for name in ("steps", "tokens")} == {
        name: reference.summary[name] for name in ("steps", "tokens")
    }
    ours, theirs = (load_file(stage.path / HEADS_FILE) for stage in (made, reference))
    assert all(torch.allclose(ours[name], tensor, atol=1e-4) for name, tensor in theirs.items())
    assert not (made.path / "ray").exists()
    assert stages_run(run) == ["train"] and latest(run, "train").path != latest(finished_run, "train").path
    assert latest(run, "train").verify() == []
