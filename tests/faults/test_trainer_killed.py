"""A killed trainer resumes to the weights of an uninterrupted run."""

from __future__ import annotations

import signal

import pytest

from pipeline.training.metrics import read_metrics
from tests.faults.processes import run_until_killed
from tests.faults.unfinished import cut_before, temporary_files, write_config
from tests.flows.tiny import latest, run_again, stages_run

pytestmark = pytest.mark.fault

RECIPE = {"train__epochs": 2, "train__batch_tokens": 64}
DEATHS = [  # at which file's write, and the newest checkpoint that is whole then
    ("rename", "step-00000003.safetensors", 2),
    ("renamed", "step-00000005.safetensors", 5),
    ("rename", "step-00000015.safetensors", 14),
    ("rename", "heads.safetensors", None),
    ("renamed", "heads.safetensors", None),
]


def curve_of(run):
    """Return each step's loss, in the order of the log."""
    lines = read_metrics(latest(run, "train").path)
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def test_a_killed_trainer_ends_with_the_uninterrupted_runs_weights(
    finished_run, copied_run, make_settings, make_config, tmp_path
):
    reference = run_again(make_config(tmp_path, run__name="reference", **RECIPE), until="train")
    steps = latest(reference, "train").summary["steps"]
    assert 16 <= steps < 30, "deaths are in both epochs"
    run = cut_before(copied_run, "train")
    settings = make_settings(tmp_path, train__checkpoint_every=1, **RECIPE)
    config = write_config(tmp_path / "run.yaml", settings)
    for moment, file, newest in DEATHS:
        assert run_until_killed(config, moment, file) == -signal.SIGKILL
        stage = latest(run, "train")
        assert stage.done is None
        checkpoints = sorted(stage.path.glob("checkpoints/step-*.safetensors"))
        assert newest is None or checkpoints[-1].name == f"step-{newest:08d}.safetensors"
    run = run_again(make_config(tmp_path, train__checkpoint_every=1, **RECIPE))
    assert stages_run(run)[0] == "train"
    ours, theirs = latest(run, "train"), latest(reference, "train")
    heads = [(stage.path / "heads.safetensors").read_bytes() for stage in (ours, theirs)]
    assert heads[0] == heads[1] and curve_of(run) == curve_of(reference)
    assert [step for step, _ in curve_of(run)] == list(range(1, steps + 1))
    timings = {"seconds": 0, "tokens_per_second": 0}
    assert {**ours.summary, **timings} == {**theirs.summary, **timings}
    assert temporary_files(run) == [] and ours.verify() == []
    assert stages_run(run_again(make_config(tmp_path, **RECIPE))) == []
