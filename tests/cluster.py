"""One Ray cluster for all tests that ask for it, as runs share one that RAY_ADDRESS names: a start costs ten seconds.

These tests run first, so that one worker of pytest-xdist has them all; a test that does not ask for the cluster finds
none. The other slow tests run meanwhile on the other workers, and what is fast comes last, so that all end together.
"""

from __future__ import annotations

import logging
import os
from itertools import groupby
from typing import TypeVar

import pytest

Test = TypeVar("Test")

STARTED: list[object] = []  # the cluster that stands


@pytest.fixture(scope="session")
def ray_cluster() -> None:
    """A cluster of this machine's cores, two at least: whoever asks for this fixture finds it."""


@pytest.hookimpl(trylast=True)  # once those that are not asked for are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    clustered = [item for item in items if _wants_cluster(item)]
    others = [item for item in items if not _wants_cluster(item)]
    slow = [item for item in others if item.get_closest_marker("slow")]
    fast = [item for item in others if not item.get_closest_marker("slow")]
    files = [list(file) for _, file in groupby(slow, key=lambda item: item.path)]
    items[:] = dealt(clustered, files, fast, workers)


def dealt(clustered: list[Test], slow: list[list[Test]], fast: list[Test], workers: int) -> list[Test]:
    """An order whose first share, as pytest-xdist deals them, begins with the cluster's tests, and each other one with
    slow tests; those of a file stay together. Every share ends with fast tests, which idle workers take over."""
    hands: list[list[Test]] = [[*clustered], *([] for _ in range(workers - 1))]
    for file in sorted(slow, key=len, reverse=True):
        min(hands[1:] or hands, key=len).extend(file)
    left, rest = sum(map(len, hands)) + len(fast), iter(fast)
    for turn, hand in enumerate(hands):
        share = left // (workers - turn)
        hand += [test for _, test in zip(range(share - len(hand)), rest, strict=False)]
        left -= share
    return [test for hand in hands for test in hand] + [*rest]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _wants_cluster(item):
        if not STARTED:
            _start()
    elif STARTED:
        import ray

        ray.shutdown()
        STARTED.clear()


def _wants_cluster(item: pytest.Item) -> bool:
    return "ray_cluster" in getattr(item, "fixturenames", ())


def _start() -> None:
    ray = pytest.importorskip("ray")
    from pipeline.execution.ray_executor import OBJECT_STORE_BYTES, own_signals, without_stderr, worker_environment

    settings = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False, "log_to_driver": False}
    environment = {"env_vars": worker_environment()}
    cpus = max(2, len(os.sched_getaffinity(0)))
    with without_stderr(), own_signals():
        started = ray.init("local", num_cpus=cpus, runtime_env=environment, logging_level=logging.ERROR, **settings)
    STARTED.append(started)
