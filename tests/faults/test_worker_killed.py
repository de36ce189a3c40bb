"""A Ray worker is killed in generation, in features, or hangs: another goes on, and the result is
the same.

In training: tests/test_flow_ray.py.
"""

from __future__ import annotations

import functools
import time

import pytest
from rich.console import Console

from pipeline.flow import run_flow
from pipeline.stages import features, generate
from tests.faults.unfinished import assert_as_uninterrupted, cut_before
from tests.faults.workers import MIDDLE, CopyingKilledOnce, KilledOnce, diary_of, first_time
from tests.flows.tiny import last_events, latest, run_again, shards_made, stages_run

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

HUNG = MIDDLE + 1  # the shard that hangs once
DEADLINE = 8  # seconds: a worker that does not hang needs a tenth of one


class HangsOnceAndIsKilledOnce(CopyingKilledOnce):
    """It never returns from shard `HUNG`, the first time."""

    def before(self, task):
        super().before(task)
        if task.index == HUNG and first_time(diary_of(task, "hung"), "hung"):
            wait_for_an_answer_that_never_comes()


def wait_for_an_answer_that_never_comes() -> None:
    time.sleep(3600)


def test_a_worker_killed_mid_write_or_hanging_costs_one_attempt_and_no_byte(
    finished_run, copied_run, make_config, tmp_path, monkeypatch
):
    cut_before(copied_run, "generate")
    (tmp_path / "finished.txt").write_text(str(latest(finished_run, "generate").path))
    monkeypatch.setattr(generate, "Worker", HangsOnceAndIsKilledOnce)
    monkeypatch.setattr(features, "Worker", functools.partial(KilledOnce, features.NAME))
    impatient = make_config(tmp_path, limits__max_hours_per_shard=DEADLINE / 3600)
    run = run_flow(impatient, until="generate", console=Console(quiet=True))
    killed, hung = deaths_in(run, "generate")
    assert (killed["shard"], hung["shard"]) == (MIDDLE, HUNG) and killed["error"]
    assert "It hung" in hung["error"] and "wait_for_an_answer_that_never_comes" in hung["error"]
    begun, done = (line.split()[1] for line in (tmp_path / "hung.txt").read_text().splitlines())
    assert begun != done, "another worker did it"
    assert sorted(shards_made(run)) == [("generate", index) for index in range(4)]

    run = run_flow(make_config(tmp_path), until="features", console=Console(quiet=True))
    (killed,) = deaths_in(run, "features")
    assert killed["shard"] == MIDDLE and killed["error"]
    assert sorted(shards_made(run)) == [("features", index) for index in range(4)]
    for name in ("generate", "features"):
        assert (tmp_path / f"{name}.txt").read_text().count("killed") == 2, (
            "its second worker was let live"
        )

    monkeypatch.undo()
    assert stages_run(run_again(make_config(tmp_path))) == ["train", "calibrate", "export", "check"]
    assert_as_uninterrupted(run, finished_run)


def deaths_in(run, stage: str) -> list[dict]:
    return [
        event
        for event in last_events(run)
        if event["event"] == "worker-died" and event["stage"] == stage
    ]
