"""A Ray worker is killed in generation, in features, in training: another goes on, and the result is the same."""

from __future__ import annotations

import functools
import shutil

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from pipeline.flow import run_flow
from pipeline.stages import features, generate
from pipeline.storage.run_directory import RunDirectory
from pipeline.training import ray_entry
from tests.faults.unfinished import assert_as_uninterrupted, cut_before
from tests.faults.workers import MIDDLE, STEPS_BEFORE_DEATH, KilledOnce, train_and_be_killed
from tests.flows.tiny import last_events, latest, run_again, shards_made, stages_run

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


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


@pytest.fixture(scope="module")
def killed_in_training(ray_cluster, finished_run, make_config, tmp_path_factory):
    """A run whose training worker was killed, and where the process of every step was written down."""
    root = tmp_path_factory.mktemp("killed")
    shutil.copytree(finished_run.path, root / "run", symlinks=True)
    cut_before(RunDirectory(root / "run"), "train")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ray_entry, "train_on_ray", train_and_be_killed)
        run = run_flow(make_config(root, train__checkpoint_every=1), until="train", console=Console(quiet=True))
    return run, (root / "trainer.txt").read_text().split()


def test_a_training_worker_killed_mid_epoch_goes_on_from_the_newest_checkpoint_to_the_same_weights(
    finished_run, killed_in_training
):
    run, steps = killed_in_training
    first = steps.count(steps[0])
    assert first == STEPS_BEFORE_DEATH + 1 and steps[0] not in steps[first:]
    total = latest(finished_run, "train").summary["steps"]
    assert 0 < len(steps) - first < total, "it did not begin again"
    assert latest(run, "train").summary["steps"] == total
    ours, theirs = (load_file(latest(of, "train").path / "heads.safetensors") for of in (run, finished_run))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], tensor, atol=1e-5) for name, tensor in theirs.items())
    assert latest(run, "train").verify() == []


def test_the_death_of_a_training_worker_is_an_event(killed_in_training):
    run, _ = killed_in_training
    assert [event["stage"] for event in last_events(run) if event["event"] == "worker-died"] == ["train"]
