"""Ctrl-C and SIGTERM while the heads are trained, and once more while the run is already stopping.

What a signal does to a sharded stage: tests/test_flow_interrupted.py, and through Ray
tests/test_flow_ray.py.
"""

from __future__ import annotations

import signal

import pytest

from pipeline.storage.run_directory import RunDirectory
from tests.faults.processes import Waiting
from tests.faults.unfinished import assert_as_uninterrupted, cut_before, write_config
from tests.flows.tiny import latest, run_again, shards_made, stages_run

pytestmark = [pytest.mark.fault, pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])]


def heads_of(run: RunDirectory) -> bytes:
    return (latest(run, "train").path / "heads.safetensors").read_bytes()


def test_a_signal_stops_training_cleanly_and_the_same_command_ends_with_the_same_weights(
    finished_run, copied_run, make_settings, make_config, tmp_path, sent
):
    run, changes = cut_before(copied_run, "train"), {"train__checkpoint_every": 1}
    config = write_config(tmp_path / "run.yaml", make_settings(tmp_path, **changes))
    driver = Waiting(config, tmp_path / "said.txt", "train")
    assert driver.is_at("train")
    driver.send(sent)
    code, said = driver.end()
    assert code == 128 + sent
    (stopped,) = [line for line in said.splitlines() if line.startswith("stopped: ")]
    assert (
        sent.name in stopped and "the same command continues" in stopped and "Traceback" not in said
    )
    stage = latest(run, "train")
    assert stage.done is None and (stage.path / "checkpoints/step-00000002.safetensors").exists(), (
        "its last step is kept"
    )
    run = run_again(make_config(tmp_path, **changes))
    assert stages_run(run) == ["train", "calibrate", "export", "check"]
    assert heads_of(run) == heads_of(finished_run)
    assert_as_uninterrupted(run, finished_run)


def test_a_second_signal_ends_a_run_that_takes_long_to_stop_and_what_was_committed_is_kept(
    finished_run, copied_run, make_settings, make_config, tmp_path, sent
):
    run = cut_before(copied_run, "generate")
    config = write_config(tmp_path / "run.yaml", make_settings(tmp_path))
    driver = Waiting(config, tmp_path / "said.txt", "generate", "end")
    assert driver.is_at("generate")
    driver.send(sent)
    assert driver.is_at("end")
    driver.send(sent)
    code, said = driver.end()
    assert code == -sent and "Traceback" not in said
    assert list(latest(run, "generate").receipts()) == [0]
    run = run_again(make_config(tmp_path))
    assert [made for made in shards_made(run) if made[0] == "generate"] == [
        ("generate", i) for i in (1, 2, 3)
    ]
    assert_as_uninterrupted(run, finished_run)
