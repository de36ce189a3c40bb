"""A node of a cluster is lost mid-write: the shard goes to another node, and the result is the
same.
"""

from __future__ import annotations

import functools

import pytest
from rich.console import Console

from pipeline.flow import run_flow
from pipeline.stages import generate
from tests.faults.unfinished import cut_before, files_of
from tests.faults.workers import MIDDLE, LosesItsNode
from tests.flows.tiny import last_events, latest, shards_made

pytestmark = [pytest.mark.fault, pytest.mark.slow]

SMALL = {"object_store_memory": 80 * 1024**2}


@pytest.fixture
def cluster(monkeypatch):
    """A head without cores and two nodes of one each, which RAY_ADDRESS names."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, **SMALL}
    nodes = Cluster(initialize_head=True, connect=False, head_node_args=head)
    for _ in range(2):
        nodes.add_node(wait=False, num_cpus=1, **SMALL)
    nodes.wait_for_nodes()
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    yield nodes
    nodes.shutdown()


def test_a_node_lost_mid_stage_costs_one_attempt_and_no_byte(
    finished_run, copied_run, make_config, tmp_path, monkeypatch, cluster
):
    before = latest(finished_run, "generate")
    (tmp_path / "finished.txt").write_text(str(before.path))
    cut_before(copied_run, "generate")
    monkeypatch.setattr(generate, "Worker", functools.partial(LosesItsNode, generate.NAME))
    config = make_config(tmp_path, placement__generate={"workers": 2, "cpus_per_worker": 1})
    run = run_flow(config, until="generate", console=Console(quiet=True))
    raylets = [node.all_processes["raylet"][0].process for node in cluster.list_all_nodes()]
    assert [raylet.poll() is None for raylet in raylets].count(False) == 1
    (death,) = (event for event in last_events(run) if event["event"] == "worker-died")
    assert death["shard"] == MIDDLE and death["error"]
    assert sorted(index for stage, index in shards_made(run) if stage == "generate") == [0, 1, 2, 3]
    made = files_of(latest(run, "generate"))
    assert {name: made[name] for name in made if not name.endswith(".tmp")} == files_of(before)
    assert latest(run, "generate").verify() == []
