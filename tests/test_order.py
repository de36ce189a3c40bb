"""Tests that wait and tests that compute run side by side from the start, as `tests/cluster.py`
orders them.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster import dealt


class Node:
    """A worker, as the scheduler sees it."""

    shutting_down = False

    def __init__(self, order: list[str], number: int):
        self.order, self.gateway = order, SimpleNamespace(id=str(number))
        self.share: list[str] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.share += [self.order[index] for index in indices]

    def send_steal(self, indices: list[int]) -> None: ...

    def shutdown(self) -> None: ...


def shares(order: list[str], workers: int) -> list[list[str]]:
    """What pytest-xdist's own scheduler gives each worker to begin with."""
    scheduling = pytest.importorskip("xdist.scheduler").WorkStealingScheduling
    scheduler = scheduling(SimpleNamespace(getvalue=lambda name: ["popen"] * workers))
    nodes = [Node(order, number) for number in range(workers)]
    for node in nodes:
        scheduler.add_node(node)
    for node in nodes:
        scheduler.add_node_collection(node, order)
    scheduler.schedule()
    return [node.share for node in nodes]


FILES = st.lists(st.integers(1, 5), max_size=8)


@settings(max_examples=40)
@given(clustered=FILES, slow=FILES, num_fast=st.integers(0, 400), workers=st.integers(1, 5))
def test_no_test_is_lost_and_every_worker_begins_with_what_is_slow(
    clustered, slow, num_fast, workers
):
    of_cluster, of_slow = (
        [[f"{kind}{file}.{i}" for i in range(size)] for file, size in enumerate(sizes)]
        for kind, sizes in (("c", clustered), ("s", slow))
    )
    fast = [f"f{i}" for i in range(num_fast)]
    order = dealt(of_cluster, of_slow, fast, workers)
    assert sorted(order) == sorted(
        [*(test for file in (*of_cluster, *of_slow) for test in file), *fast]
    )
    assert all("".join(file) in "".join(order) for file in (*of_cluster, *of_slow)), (
        "a file stays together"
    )
    if num_fast < 5 * (sum(clustered) + sum(slow)):
        return  # too few fast ones to even the shares out
    clusters = 2 if workers > 3 else 1
    for turn, share in enumerate(shares(order, workers)):
        kinds = [test[0] for test in share]
        assert kinds == sorted(kinds, key="csf".index) and ("c" not in kinds or turn < clusters)
        assert "c" in kinds or turn >= clusters or len(clustered) <= turn
        assert "s" in kinds or turn < clusters or len(slow) < workers - clusters
