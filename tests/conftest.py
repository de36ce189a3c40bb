"""Common to all tests: no network, no usage reports, quiet engines."""

from __future__ import annotations

import atexit
import gc
import os
from gc import freeze, unfreeze  # as they are before a test replaces them
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = (
    os.environ.get("OMP_NUM_THREADS") or "1"
)  # tensors are tiny: more threads only wait
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault(
    "RAY_worker_niceness", "0"
)  # Ray's 15 starves its workers beside another test process
os.environ.setdefault(
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0"
)  # a process of its own in each training, and no node is drained here
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # after its threads are set: OpenMP reads their number once, when torch is loaded
from hypothesis import register_random, settings

import tests.unsynced  # noqa: F401

# until the tests are collected: of what they import nothing is garbage, and looking takes six
# seconds
gc.disable()
atexit.register(unfreeze)  # libraries tell of what is left at the end
settings.register_profile("untimed", deadline=None)  # a busy machine is not a failure
settings.load_profile("untimed")


class TorchsGenerator:
    """Hypothesis seeds torch's own generator before every example, so that what fails fails again.

    That of the CPU alone: `torch.manual_seed` writes down the stack for each kind of device that is
    not there.
    """

    seed = staticmethod(torch.default_generator.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCHS_GENERATOR = TorchsGenerator()  # Hypothesis holds it weakly
register_random(TORCHS_GENERATOR)

pytest_plugins = ["tests.flows.tiny", "tests.cluster"]


SEEN: set[Path] = set()  # files of which a test has run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest test: nobody then waits for it at the end."""
    items.sort(key=lambda item: item.path.name != "test_flow_ray.py")


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch, so that a test's draws do not depend on the tests before it.

    Before each file, freeze all objects: torch and thousands of collected tests would cost every
    garbage collection half a second.
    """
    torch.default_generator.manual_seed(0)
    if item.path not in SEEN:
        SEEN.add(item.path)
        gc.collect()
        freeze()


def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores that this process may use, since engines and clusters are waited
    for; each takes one to two GB of memory, an engine two more, and twenty seconds for its
    imports."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)) + 1, memory // (4 * 10**9), 8))
