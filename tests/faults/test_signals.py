"""A signal ends a stage or training with its exit code, and the run resumes.

Through Ray: tests/test_flow_ray.py.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from pipeline.errors import KEPT
from tests.faults.processes import Waiting
from tests.faults.unfinished import assert_as_uninterrupted, cut_before, write_config
from tests.flows.tiny import STAGES, latest, run_again, shards_made, stages_run
from tests.forks import PATIENCE

pytestmark = pytest.mark.fault


def wait_for(happened: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


SIGNALS = pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)


@pytest.mark.parametrize("stage", ["generate", "train"])
@SIGNALS
def test_a_signal_keeps_committed_work_and_the_run_continues(
    finished_run, copied_run, make_settings, make_config, tmp_path, stage, sent, code
):
    run = cut_before(copied_run, stage)
    config = write_config(tmp_path / "run.yaml", make_settings(tmp_path))
    driver = Waiting(config, tmp_path / "said.txt", stage)
    assert driver.is_at(stage)
    driver.send(sent)
    if stage == "train":
        driver.go_on()  # the step at hand is finished
    ended, said = driver.end()
    assert ended == code and "Traceback" not in said
    assert latest(run, stage).done is None
    if stage == "generate":
        assert said == f"Stopped by {sent.name}. {KEPT}\n"
        assert list(latest(run, stage).receipts()) == [0]
    else:
        assert f"Stopped by {sent.name}. Training stopped after step 2 of 3" in said
        saved = list((latest(run, stage).path / "checkpoints").iterdir())
        assert [path.name for path in saved] == ["step-00000002.safetensors"]
    run = run_again(make_config(tmp_path))
    assert stages_run(run) == STAGES[STAGES.index(stage) :]
    made = [index for name, index in shards_made(run) if name == "generate"]
    assert made == ([1, 2, 3] if stage == "generate" else [])
    heads = [latest(of, "train").path / "heads.safetensors" for of in (run, finished_run)]
    assert heads[0].read_bytes() == heads[1].read_bytes()
    assert_as_uninterrupted(run, finished_run)


@pytest.mark.parametrize(("stage", "then"), [("generate", "end"), ("train", None)])
def test_a_second_signal_ends_a_slow_stop(copied_run, make_settings, tmp_path, stage, then):
    run = cut_before(copied_run, stage)
    config = write_config(tmp_path / "run.yaml", make_settings(tmp_path))
    driver = Waiting(config, tmp_path / "said.txt", stage, "end")
    assert driver.is_at(stage)
    driver.send(signal.SIGTERM)
    if then:
        assert driver.is_at(then)
    else:
        wait_for(lambda: list(latest(run, stage).path.glob("stop-*")))
    driver.send(signal.SIGTERM)
    code, said = driver.end()
    assert code == -signal.SIGTERM and "Traceback" not in said
    if stage == "generate":
        assert list(latest(run, stage).receipts()) == [0]
