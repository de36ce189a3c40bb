"""A Ray cluster that tests share, and the order of slow tests.

These tests run first, since they wait more than they compute; a test that does not ask for the
cluster finds none. The tests that load vLLM into their own process (`vllm_here`) follow, then the
other slow ones; fast ones come last.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import pickle

import pytest

STARTED: list[object] = []  # the cluster that stands


@pytest.fixture(scope="session")
def ray_cluster():
    """A shared Ray cluster of this machine's cores, at least two."""


@pytest.fixture(scope="session")
def vllm_here():
    """Import vLLM into this process, which takes eleven seconds.

    Its objects are frozen, since each engine asks for nine collections of garbage. The end of an
    engine would unfreeze them, so `gc.freeze` and `gc.unfreeze` do nothing from now on.
    """
    if importlib.util.find_spec("vllm"):
        from vllm import LLM  # noqa: F401

        gc.collect()
        gc.freeze()
        gc.freeze = gc.unfreeze = lambda: None


def work_here(monkeypatch, module):
    """Make `module` call functions in this process instead of a new one; pickle as it would."""

    def here(function, task, on_report=None):
        report = on_report or (lambda **progress: None)
        called, copied = pickle.loads(pickle.dumps((function, task)))
        return pickle.loads(pickle.dumps(called(copied, report)))

    monkeypatch.setattr(module, "in_own_process", here)


@pytest.hookimpl(trylast=True)  # once deselected tests are gone
def pytest_collection_modifyitems(items):
    """Run the slowest tests first; idle workers of pytest-xdist steal from the end."""
    items.sort(key=_turn)  # stable: the tests of a file keep their order


def _turn(item):
    if _wants_cluster(item):
        return 0
    if "vllm_here" in getattr(item, "fixturenames", ()):
        return 1
    return 2 if item.get_closest_marker("slow") else 3


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if _wants_cluster(item):
        if not STARTED:
            _start()
    elif STARTED:
        import ray

        ray.shutdown()
        STARTED.clear()


def _wants_cluster(item):
    return "ray_cluster" in getattr(item, "fixturenames", ())


def _start():
    pytest.importorskip("ray")
    from pipeline.execution.ray_cluster import own_signals, start_cluster

    with own_signals():
        started = start_cluster(max(2, len(os.sched_getaffinity(0))))
    STARTED.append(started)
