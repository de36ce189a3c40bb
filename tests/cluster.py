"""A Ray cluster for the tests that ask for it, as runs share one that RAY_ADDRESS names: a start
costs ten seconds.

These tests run first: one worker of pytest-xdist has them all, or two with a cluster each where
there are more than three, since they wait more than they compute. A test that does not ask for the
cluster finds none. The other slow tests run meanwhile on the other workers, the longest first, and
what is fast comes last, so that all end together. Those that load vLLM into their own process ask
for `vllm_here`: one worker has them all, and imports it once.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test")

STARTED: list[object] = []  # the cluster that stands


@pytest.fixture(scope="session")
def ray_cluster() -> None:
    """A cluster of this machine's cores, two at least: whoever asks for this fixture finds it."""


@pytest.fixture(scope="session")
def vllm_here() -> None:
    """This process loads vLLM, which takes eleven seconds: what needs its engines had better run
    here, too.

    It is frozen: each engine asks for nine collections of garbage, which would look through all of
    it. The end of an engine would unfreeze it for the next one, so from now on nobody freezes or
    unfreezes anything through `gc`.
    """
    if importlib.util.find_spec("vllm"):
        from vllm import LLM  # noqa: F401

        gc.collect()
        gc.freeze()
        gc.freeze = gc.unfreeze = lambda: None


def work_here(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """`module` works in this process, with pickled tasks and results, instead of its own."""

    def here(
        function: Callable[..., Any], task: Any, on_report: Callable[..., None] | None = None
    ) -> Any:
        report = on_report or (lambda **progress: None)
        called, copied = pickle.loads(pickle.dumps((function, task)))
        return pickle.loads(pickle.dumps(called(copied, report)))

    monkeypatch.setattr(module, "in_own_process", here)


@pytest.hookimpl(trylast=True)  # once those that are not asked for are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    clustered: dict[object, list[pytest.Item]] = {}
    slow: dict[object, list[pytest.Item]] = {}
    vllm: list[pytest.Item] = []
    fast: list[pytest.Item] = []
    for item in items:
        if _wants_cluster(item):
            clustered.setdefault(item.path, []).append(item)
        elif "vllm_here" in getattr(item, "fixturenames", ()):
            vllm.append(item)
        elif item.get_closest_marker("slow"):
            slow.setdefault(item.path, []).append(item)
        else:
            fast.append(item)
    longest_first = sorted(slow.values(), key=len)  # a file of one test has a long one
    items[:] = dealt([*clustered.values()], [vllm, *longest_first], fast, workers)


def dealt(
    clustered: list[list[Test]], slow: list[list[Test]], fast: list[Test], workers: int
) -> list[Test]:
    """An order whose first share, as pytest-xdist deals them, begins with tests of a cluster, the
    second too where there are more than three, and each other one with slow tests, whose files keep
    their order; those of a file stay together. Every share ends with fast tests, which idle workers
    take over."""
    hands: list[list[Test]] = [[] for _ in range(workers)]
    clusters = 2 if workers > 3 else 1
    for files, takers in ((clustered, hands[:clusters]), (slow, hands[clusters:] or hands)):
        for file in files:
            min(takers, key=len).extend(file)
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
    pytest.importorskip("ray")
    from pipeline.execution.ray_cluster import own_signals, start_cluster

    with own_signals():
        started = start_cluster(max(2, len(os.sched_getaffinity(0))))
    STARTED.append(started)
