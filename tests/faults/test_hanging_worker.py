"""A worker that hangs is ended at its deadline, where it hung is logged, and another does its shard."""

from __future__ import annotations

import time

import pytest
from rich.console import Console

from pipeline.flow import run_flow
from pipeline.stages import generate
from tests.faults.unfinished import assert_as_uninterrupted, cut_before
from tests.faults.workers import MIDDLE, Copying, diary_of, first_time
from tests.flows.tiny import last_events, latest, run_again, shards_made, stages_run

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

DEADLINE = 8  # seconds: a worker that does not hang needs a tenth of one


class HangsOnce(Copying):
    """It never returns from shard `MIDDLE`, the first time."""

    def before(self, task):
        if task.index == MIDDLE and first_time(diary_of(task, "hung"), "hung"):
            wait_for_an_answer_that_never_comes()


def wait_for_an_answer_that_never_comes() -> None:
    time.sleep(3600)


def test_a_worker_that_hangs_is_ended_and_another_does_its_shard(
    finished_run, copied_run, make_config, tmp_path, monkeypatch
):
    cut_before(copied_run, "generate")
    (tmp_path / "finished.txt").write_text(str(latest(finished_run, "generate").path))
    monkeypatch.setattr(generate, "Worker", HangsOnce)
    config = make_config(tmp_path, limits__max_hours_per_shard=DEADLINE / 3600)
    run = run_flow(config, until="generate", console=Console(quiet=True))
    (death,) = (event for event in last_events(run) if event["event"] == "worker-died")
    assert death["stage"] == "generate" and death["shard"] == MIDDLE
    assert "It hung" in death["error"] and "wait_for_an_answer_that_never_comes" in death["error"]
    hung, done = (line.split()[1] for line in (tmp_path / "hung.txt").read_text().splitlines())
    assert hung != done, "another worker did it"
    assert sorted(index for _, index in shards_made(run)) == [0, 1, 2, 3]
    monkeypatch.undo()
    assert stages_run(run_again(make_config(tmp_path)))[0] == "features"
    assert_as_uninterrupted(run, finished_run)
