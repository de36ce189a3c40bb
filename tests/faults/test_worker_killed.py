"""A Ray worker is killed in generation, in features: another goes on, and the result is the same.

In training: tests/test_flow_ray.py.
"""

from __future__ import annotations

import functools

import pytest
from rich.console import Console

from pipeline.flow import run_flow
from pipeline.stages import features, generate
from tests.faults.unfinished import assert_as_uninterrupted, cut_before
from tests.faults.workers import MIDDLE, CopyingKilledOnce, KilledOnce
from tests.flows.tiny import last_events, latest, run_again, shards_made, stages_run

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


def test_a_worker_killed_mid_write_in_generation_and_in_features_costs_one_attempt(
    finished_run, copied_run, make_config, tmp_path, monkeypatch
):
    cut_before(copied_run, "generate")
    (tmp_path / "finished.txt").write_text(str(latest(finished_run, "generate").path))
    monkeypatch.setattr(generate, "Worker", CopyingKilledOnce)
    monkeypatch.setattr(features, "Worker", functools.partial(KilledOnce, features.NAME))
    run = run_flow(make_config(tmp_path), until="features", console=Console(quiet=True))
    for name in ("generate", "features"):
        assert (tmp_path / f"{name}.txt").read_text().count("killed") == 2, "its second worker was let live"
        (death,) = (event for event in last_events(run) if event["event"] == "worker-died" and event["stage"] == name)
        assert death["shard"] == MIDDLE and death["error"]
        assert sorted(index for stage, index in shards_made(run) if stage == name) == [0, 1, 2, 3]
    monkeypatch.undo()
    assert stages_run(run_again(make_config(tmp_path))) == ["train", "calibrate", "export", "check"]
    assert_as_uninterrupted(run, finished_run)
