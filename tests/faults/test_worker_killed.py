"""A Ray worker is killed in generation, in features, in training: another goes on, and the result is the same."""

from __future__ import annotations

import functools

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from pipeline.flow import run_flow
from pipeline.stages import features, generate
from pipeline.training import ray_entry
from tests.faults.unfinished import assert_as_uninterrupted, cut_before
from tests.faults.workers import MIDDLE, STEPS_BEFORE_DEATH, KilledOnce, killed_trainer
from tests.flows.tiny import last_events, latest, run_again, shards_made, stages_run

pytestmark = [pytest.mark.fault, pytest.mark.usefixtures("ray_cluster")]


def test_a_worker_killed_mid_write_in_generation_and_in_features_costs_one_attempt(
    finished_run, copied_run, make_config, tmp_path, monkeypatch
):
    cut_before(copied_run, "generate")
    for stage in (generate, features):
        monkeypatch.setattr(stage, "Worker", functools.partial(KilledOnce, stage.NAME))
    run = run_flow(make_config(tmp_path), until="features", console=Console(quiet=True))
    for name in ("generate", "features"):
        assert (tmp_path / f"{name}.txt").read_text().count("killed") == 2, "its second worker was let live"
        (death,) = (event for event in last_events(run) if event["event"] == "worker-died" and event["stage"] == name)
        assert death["shard"] == MIDDLE and death["error"]
        assert sorted(index for stage, index in shards_made(run) if stage == name) == [0, 1, 2, 3]
    monkeypatch.undo()
    assert stages_run(run_again(make_config(tmp_path))) == ["train", "calibrate", "export", "check"]
    assert_as_uninterrupted(run, finished_run)


def test_a_training_worker_killed_mid_epoch_goes_on_from_the_newest_checkpoint_to_the_same_weights(
    finished_run, copied_run, make_config, tmp_path, monkeypatch
):
    cut_before(copied_run, "train")
    monkeypatch.setattr(ray_entry, "_worker", killed_trainer)
    run = run_flow(make_config(tmp_path, train__checkpoint_every=1), until="train", console=Console(quiet=True))
    steps = (tmp_path / "trainer.txt").read_text().split()
    first = steps.count(steps[0])
    assert first == STEPS_BEFORE_DEATH + 1 and set(steps[first:]) != {steps[0]}
    total = latest(finished_run, "train").summary["steps"]
    assert len(steps) - first < total, "it did not begin again"
    assert latest(run, "train").summary["steps"] == total
    ours, theirs = (load_file(latest(of, "train").path / "heads.safetensors") for of in (run, finished_run))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], tensor, atol=1e-5) for name, tensor in theirs.items())
    assert latest(run, "train").verify() == []
