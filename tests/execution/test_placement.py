"""A placement fits on the nodes, or is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import PlacementOf
from pipeline.errors import EnvironmentFault
from pipeline.execution.placement import Resources, place

CORES = st.integers(0, 5) | st.integers(0, 64)
WITHOUT_GPUS = st.lists(st.tuples(CORES, st.just(0)), min_size=1, max_size=4)
NODES = WITHOUT_GPUS | st.lists(st.tuples(CORES, st.integers(0, 8)), min_size=1, max_size=4)
WANTED = st.builds(
    PlacementOf,
    workers=st.integers(1, 12),
    gpus_per_worker=st.none() | st.integers(0, 9),
    cpus_per_worker=st.none() | st.integers(1, 20),
)


def can_place(nodes, workers, cpus, gpus):
    """Return whether workers fit when each is placed on the first node with room."""
    left = [list(node) for node in nodes]
    for _ in range(workers):
        node = next((node for node in left if node[0] >= cpus and node[1] >= gpus), None)
        if node is None:
            return False
        node[0] -= cpus
        node[1] -= gpus
    return True


@given(nodes=NODES, wanted=WANTED)
def test_a_placement_is_given_if_every_worker_fits(nodes, wanted):
    have = Resources(tuple(nodes))
    gpus = wanted.gpus_per_worker
    if gpus is None:
        gpus = min(1, have.gpus)
    try:
        placed = place("generate", wanted, have)
    except EnvironmentFault:
        assert not can_place(nodes, wanted.workers, wanted.cpus_per_worker or 1, gpus)
        return
    assert can_place(nodes, placed.workers, placed.cpus, placed.gpus)
    assert (placed.workers, placed.gpus) == (wanted.workers, gpus)
    assert wanted.cpus_per_worker in (None, placed.cpus)


@pytest.mark.parametrize(
    ("nodes", "wanted", "expected"),
    [
        (((8, 0),), {}, (1, 8, 0)),  # a laptop: all its cores
        (((8, 0), (2, 0)), {"workers": 3}, (3, 2, 0)),  # as equal a share as fits on the nodes
        (((16, 1),), {"gpus_per_worker": 0}, (1, 16, 0)),
        (((2, 0), (64, 8)), {"workers": 8}, (8, 8, 1)),  # a head node without GPUs
        (((64, 8), (32, 4)), {"workers": "auto", "gpus_per_worker": 4}, (3, 32, 4)),
        (((64, 0), (64, 0)), {"workers": "auto"}, (2, 64, 0)),  # without GPUs, one per node
        (((64, 0),), {"workers": "auto", "cpus_per_worker": 6}, (10, 6, 0)),
    ],
)
def test_defaults_come_from_what_the_cluster_has(nodes, wanted, expected):
    found = place("train", PlacementOf(**wanted), Resources(nodes))
    assert (found.workers, found.cpus, found.gpus) == expected
