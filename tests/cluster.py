"""One Ray cluster for all tests that ask for it, as runs share one that RAY_ADDRESS names: a start costs ten seconds.

These tests run first, so that one worker of pytest-xdist has them all; a test that does not ask for the cluster finds
none.
"""

from __future__ import annotations

import logging
import os

import pytest

STARTED: list[object] = []  # the cluster that stands


@pytest.fixture(scope="session")
def ray_cluster() -> None:
    """A cluster of this machine's cores, two at least: whoever asks for this fixture finds it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """After the cluster's tests comes what takes long, so that all workers end at about the same time."""
    items.sort(key=lambda item: (not _wants_cluster(item), not item.get_closest_marker("slow")))


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
