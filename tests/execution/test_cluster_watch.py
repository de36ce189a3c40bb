"""A Ray cluster that is missing or dies is reported with exit 4 within seconds."""

from __future__ import annotations

import socket

import pytest

from pipeline.errors import EnvironmentFault
from pipeline.execution import ray_cluster
from pipeline.execution.executor import make_executor
from pipeline.execution.ray_cluster import SECONDS_BETWEEN_TESTS, ClusterWatch


@pytest.mark.parametrize(
    "address", ["127.0.0.1:{closed}", "ray://127.0.0.1:{closed}", "127.0.0.1:port"]
)
def test_an_address_where_nobody_listens_is_refused(monkeypatch, address):
    """Ray itself would retry for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as once:
        address = address.format(closed=once.getsockname()[1])
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(EnvironmentFault, match="RAY_ADDRESS") as caught:
        make_executor("ray")
    assert caught.value.where == address and "\n" not in str(caught.value)


class Cluster:
    """Ray processes of which some are silent, with a clock that advances in `sleep`."""

    def __init__(self):
        self.silent: set[str] = set()
        self.now = 100.0

    def connection_error(self, address):
        return "silent" if address in self.silent else None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def cluster(monkeypatch):
    cluster = Cluster()
    monkeypatch.setattr(ray_cluster, "time", cluster)
    monkeypatch.setattr(ray_cluster, "connection_error", cluster.connection_error)
    return cluster


@pytest.mark.parametrize("silent", ["head:1", "raylet:2"])
def test_a_silent_process_is_dead_after_the_patience(cluster, silent):
    watch = ClusterWatch(["head:1", "raylet:2"], patience=20.0)
    watch.settle()
    cluster.silent, started = {silent}, cluster.now
    with pytest.raises(EnvironmentFault, match="The Ray cluster has died"):
        watch.settle()
    assert 20 <= cluster.now - started <= 20 + SECONDS_BETWEEN_TESTS and watch.is_dead


def test_a_head_that_answers_in_time_is_alive(cluster):
    watch = ClusterWatch(["head:1"], patience=1.0)
    for cluster.silent in [{"head:1"}, set()] * 3:
        watch.check()
        cluster.sleep(0.9)
    watch.settle()
