"""The trainer is killed in the middle of an epoch: the weights that it ends with are the
uninterrupted run's.
"""

from __future__ import annotations

import json
import signal

import pytest

from pipeline.storage.run_directory import RunDirectory
from tests.faults.processes import run_until_killed
from tests.faults.unfinished import cut_before, temporary_files, write_config
from tests.flows.tiny import latest, run_again, stages_run

pytestmark = pytest.mark.fault

RECIPE = {"train__epochs": 2, "train__batch_tokens": 64}
DEATHS = [  # at which step's checkpoint, and the newest that is whole then
    ("rename", "step-00000003.safetensors", 2),
    ("renamed", "step-00000005.safetensors", 5),
    ("rename", "step-00000015.safetensors", 14),
    ("rename", "heads.safetensors", None),
    ("renamed", "heads.safetensors", None),
]


def metrics_of(run: RunDirectory) -> list[tuple[int, float]]:
    """Every step's loss, in the order in which it was logged."""
    lines = (latest(run, "train").path / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines) if "loss" in line]


def test_a_trainer_killed_mid_epoch_and_at_its_end_leaves_the_uninterrupted_run_s_weights_to_the_bit(  # noqa: E501
    finished_run, copied_run, make_settings, make_config, tmp_path
):
    reference = run_again(make_config(tmp_path, run__name="reference", **RECIPE), until="train")
    steps = latest(reference, "train").summary["steps"]
    assert steps >= 16 and 5 < steps // 2 < 15, (
        "the first deaths come in the first epoch, the third in the second"
    )
    run = cut_before(copied_run, "train")
    config = write_config(
        tmp_path / "run.yaml", make_settings(tmp_path, train__checkpoint_every=1, **RECIPE)
    )
    for moment, file, newest in DEATHS:
        assert run_until_killed(config, moment, file) == -signal.SIGKILL
        stage = latest(run, "train")
        assert stage.done is None
        checkpoints = sorted(
            path.name for path in stage.path.glob("checkpoints/step-*.safetensors")
        )
        assert newest is None or checkpoints[-1] == f"step-{newest:08d}.safetensors"
    run = run_again(make_config(tmp_path, train__checkpoint_every=1, **RECIPE))
    assert stages_run(run)[0] == "train"
    ours, theirs = (latest(of, "train") for of in (run, reference))
    assert (ours.path / "heads.safetensors").read_bytes() == (
        theirs.path / "heads.safetensors"
    ).read_bytes()
    assert metrics_of(run) == metrics_of(reference) and [step for step, _ in metrics_of(run)] == [
        *range(1, steps + 1)
    ]
    timed = ("seconds", "tokens_per_second")
    assert {k: v for k, v in ours.summary.items() if k not in timed} == {
        k: v for k, v in theirs.summary.items() if k not in timed
    }
    assert temporary_files(run) == [] and ours.verify() == []
    assert stages_run(run_again(make_config(tmp_path, **RECIPE))) == []
