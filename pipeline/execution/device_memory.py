"""The memory of this machine and of its GPUs, and whether torch can use them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

GIB = 1 << 30
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def gpu_memory() -> float | None:
    """The memory of the smallest visible GPU, in bytes; None without one."""
    import torch

    sizes = [
        torch.cuda.get_device_properties(gpu).total_memory
        for gpu in range(torch.cuda.device_count())
    ]
    return min(sizes, default=None)


def num_gpus() -> int:
    """How many GPUs are visible."""
    import torch

    return torch.cuda.device_count()


def machine_memory(limits: tuple[str, ...] = CGROUP_LIMITS) -> float:
    """The memory that processes of this machine may use: all of it, or a container's limit."""
    found = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    for path in map(Path, limits):
        if path.is_file() and (said := path.read_text(encoding="ascii").strip()).isdigit():
            found.append(float(said))
    return min(found)


def unusable_driver(
    environment: Mapping[str, str] = os.environ, driver: Path = Path("/proc/driver/nvidia/version")
) -> str | None:
    """Why torch cannot use the GPU whose driver is installed here, in a sentence; None where
    nothing is amiss.

    A torch that was built without CUDA, and GPUs that CUDA_VISIBLE_DEVICES hides, are somebody's
    choice.
    """
    import torch

    hidden = environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if torch.version.cuda is None or hidden or not driver.is_file() or torch.cuda.is_available():
        return None
    first = driver.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [
        "of an unknown version"
    ]
    said = " ".join(first[0].removeprefix("NVRM version:").split())
    return (
        f"A GPU's driver is installed here ({said}), and torch {torch.__version__}, built for CUDA "
        f"{torch.version.cuda}, finds no GPU with it"
    )
