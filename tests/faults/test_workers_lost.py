"""A worker that is killed, loses its node or meets a crashing row changes no result."""

from __future__ import annotations

import functools

import pytest
from rich.console import Console

from pipeline.flow import run_flow
from pipeline.run import sharded
from pipeline.stages import features, generate
from tests.faults.unfinished import assert_as_uninterrupted, cut_before, files_of
from tests.faults.workers import (
    MIDDLE,
    CopyingAndKilledOnce,
    KilledOnce,
    LosesItsNode,
    Poisoned,
)
from tests.flows.tiny import (
    last_events,
    latest,
    quarantined,
    run_again,
    shards_made,
    stages_run,
    stored,
)

pytestmark = [pytest.mark.fault, pytest.mark.slow]

SMALL = {"object_store_memory": 80 * 1024**2}
DEATHS = 2  # of a shard before its rows are searched, and of a single row before it is given up


@pytest.fixture
def before(finished_run, copied_run, tmp_path):
    """The finished generate stage, removed from the copied run; workers copy its rows."""
    stage = latest(finished_run, "generate")
    (tmp_path / "finished.txt").write_text(str(stage.path))
    cut_before(copied_run, "generate")
    return stage


def generated(config):
    return run_flow(config, until="generate", console=Console(quiet=True))


def deaths_in(run, stage):
    events = [event for event in last_events(run) if event["event"] == "worker-died"]
    return [event for event in events if event["stage"] == stage]


def test_a_killed_worker_costs_one_attempt(
    ray_cluster, before, finished_run, make_config, tmp_path, monkeypatch
):
    monkeypatch.setattr(generate, "Worker", CopyingAndKilledOnce)
    monkeypatch.setattr(features, "Worker", functools.partial(KilledOnce, features.NAME))
    run = generated(make_config(tmp_path))
    (killed,) = deaths_in(run, "generate")
    assert killed["shard"] == MIDDLE and killed["error"]
    assert sorted(shards_made(run)) == [("generate", index) for index in range(4)]
    run = run_flow(make_config(tmp_path), until="features", console=Console(quiet=True))
    (killed,) = deaths_in(run, "features")
    assert killed["shard"] == MIDDLE and killed["error"]
    assert sorted(shards_made(run)) == [("features", index) for index in range(4)]
    monkeypatch.undo()
    assert stages_run(run_again(make_config(tmp_path))) == ["train", "calibrate", "export", "check"]
    assert_as_uninterrupted(run, finished_run)


def test_a_deadly_row_alone_is_quarantined(ray_cluster, before, make_config, tmp_path, monkeypatch):
    crashing = [row["id"] for row in stored(before) if row["split"] == "train"][-3]
    (tmp_path / "crashing.txt").write_text(crashing)
    monkeypatch.setattr(generate, "Worker", Poisoned)
    monkeypatch.setattr(sharded, "MAX_FAILURES", DEATHS)
    run = generated(make_config(tmp_path))
    stage = latest(run, "generate")
    (refused,) = [row for row in quarantined(stage) if row not in quarantined(before)]
    assert (refused["id"], refused["row"]["id"]) == (crashing, crashing)
    assert refused["reason"] == "killed-worker" and f"{DEATHS} times" in refused["detail"]
    assert stored(stage) == [row for row in stored(before) if row["id"] != crashing]
    assert len(deaths_in(run, "generate")) == DEATHS
    assert not (stage.path / "isolation").exists() and stage.verify() == []


@pytest.fixture
def cluster(monkeypatch):
    """A Ray cluster at RAY_ADDRESS: a head without cores and two nodes of one core."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, **SMALL}
    head |= {"no_monitor": True, "include_log_monitor": False}  # nobody reads what they write
    nodes = Cluster(initialize_head=True, connect=False, head_node_args=head)
    for _ in range(2):
        nodes.add_node(wait=False, num_cpus=1, **SMALL)
    nodes.wait_for_nodes()
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    yield nodes
    nodes.shutdown()


def test_a_lost_node_costs_one_attempt(before, make_config, tmp_path, monkeypatch, cluster):
    monkeypatch.setattr(generate, "Worker", functools.partial(LosesItsNode, generate.NAME))
    run = generated(make_config(tmp_path, placement__generate={"workers": 2, "cpus_per_worker": 1}))
    raylets = [node.all_processes["raylet"][0].process for node in cluster.list_all_nodes()]
    assert [raylet.poll() is None for raylet in raylets].count(False) == 1
    (death,) = deaths_in(run, "generate")
    assert death["shard"] == MIDDLE and death["error"]
    assert sorted(shards_made(run)[-4:]) == [("generate", index) for index in range(4)]
    made = files_of(latest(run, "generate"))
    assert {name: made[name] for name in made if not name.endswith(".tmp")} == files_of(before)
    assert latest(run, "generate").verify() == []
