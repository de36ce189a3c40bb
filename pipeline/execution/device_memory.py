"""What a worker holds of a device's memory at its peak, and what there is: a GPU's, or the machine's without one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

GIB = 1 << 30
UNSEEN = GIB  # of a GPU, outside of torch's count: CUDA's context and libraries
FRAGMENTED = 0.03  # of a GPU: what an allocator holds and cannot use

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Memory:
    """Bytes that one worker holds on one device at the moment when it holds most."""

    weights: float = 0  # the target's
    heads: float = 0  # with the adapter, where one trains
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0  # states, logits and batches
    cache: float = 0  # keys and values

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def plus(self, **more: float) -> Memory:
        """The same with more of some parts."""
        return replace(self, **{name: getattr(self, name) + bytes_ for name, bytes_ in more.items()})


@dataclass(frozen=True)
class Device:
    """What a worker computes on. `memory` is in bytes, None where it is not known from here."""

    name: str  # "its GPU", "this machine"
    memory: float | None
    on_gpu: bool
    share: float = 1 - FRAGMENTED  # of a GPU: what may be used

    @property
    def room(self) -> float | None:
        """What torch can use of it."""
        if self.memory is None or not self.on_gpu:
            return self.memory
        return self.memory * self.share - UNSEEN


def gpu_memory() -> float | None:
    """The memory of the smallest visible GPU, in bytes; None without one."""
    import torch

    sizes = [torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count())]
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
    """Why torch cannot use the GPU whose driver is installed here, in a sentence; None where nothing is amiss.

    A torch that was built without CUDA, and GPUs that CUDA_VISIBLE_DEVICES hides, are somebody's choice.
    """
    import torch

    hidden = environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if torch.version.cuda is None or hidden or not driver.is_file() or torch.cuda.is_available():
        return None
    first = driver.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["of an unknown version"]
    said = " ".join(first[0].removeprefix("NVRM version:").split())
    return (
        f"A GPU's driver is installed here ({said}), and torch {torch.__version__}, built for CUDA "
        f"{torch.version.cuda}, finds no GPU with it"
    )
