"""A signal ends a stage or training with its exit code, and the run resumes.

Through Ray: tests/test_flow_ray.py.
"""

from __future__ import annotations

import signal

import pytest

from tests.faults.processes import Waiting
from tests.faults.unfinished import assert_as_uninterrupted, cut_before, write_config
from tests.flows.tiny import STAGES, latest, run_again, shards_made, stages_run

pytestmark = pytest.mark.fault


@pytest.mark.parametrize("stage", ["generate", "train"])
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_committed_work_and_the_run_continues(
    finished_run, copied_run, make_settings, make_config, tmp_path, stage, sent, code
):
    run, changes = cut_before(copied_run, stage), {"train__checkpoint_every": 1}
    config = write_config(tmp_path / "run.yaml", make_settings(tmp_path, **changes))
    driver = Waiting(config, tmp_path / "said.txt", stage)
    assert driver.is_at(stage)
    driver.send(sent)
    ended, said = driver.end()
    assert ended == code and "Traceback" not in said
    assert f"Stopped by {sent.name}." in said
    assert latest(run, stage).done is None
    if stage == "generate":
        assert list(latest(run, stage).receipts()) == [0]
    else:
        assert (latest(run, stage).path / "checkpoints/step-00000002.safetensors").exists()
    run = run_again(make_config(tmp_path, **changes))
    assert stages_run(run) == STAGES[STAGES.index(stage) :]
    made = [index for name, index in shards_made(run) if name == "generate"]
    assert made == ([1, 2, 3] if stage == "generate" else [])
    heads = [latest(of, "train").path / "heads.safetensors" for of in (run, finished_run)]
    assert heads[0].read_bytes() == heads[1].read_bytes()
    assert_as_uninterrupted(run, finished_run)


def test_a_second_signal_ends_a_slow_stop(copied_run, make_settings, tmp_path):
    run = cut_before(copied_run, "generate")
    config = write_config(tmp_path / "run.yaml", make_settings(tmp_path))
    driver = Waiting(config, tmp_path / "said.txt", "generate", "end")
    assert driver.is_at("generate")
    driver.send(signal.SIGTERM)
    assert driver.is_at("end")
    driver.send(signal.SIGTERM)
    code, said = driver.end()
    assert code == -signal.SIGTERM and "Traceback" not in said
    assert list(latest(run, "generate").receipts()) == [0]
