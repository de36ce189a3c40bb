"""What every test shares: no network, no usage reports, quiet engines."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are tiny here: more threads only wait for each other
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("untimed", deadline=None)  # a busy machine is not a failure
settings.load_profile("untimed")

pytest_plugins = ["tests.flows.tiny", "tests.cluster"]


def pytest_xdist_auto_num_workers() -> int:
    """One worker per core that this process may use; each takes one to two GB of memory."""
    return min(len(os.sched_getaffinity(0)), 8)
