"""The memory of one stage's worker, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.execution.device_memory import Device, Memory

PLACED = {"generate", "features", "train", "calibrate", "check"}
# Rows of their own, by the stage of the flow.
WITHIN = {"timing": "calibrate", "served copy": "check", "vLLM check": "check", "vLLM copy": "check"}


@dataclass(frozen=True)
class StageBudget:
    """One stage's worker on one of its devices.

    `least` is what it can do with: engines halve their batches where memory runs out, training does not.
    """

    stage: str
    memory: Memory
    least: Memory
    device: Device
    on_device: int  # workers that share it: without GPUs, all of the machine's
    whole: Memory | None = None  # where workers split what trains: what one would take that has all of it
    otherwise: str = "makes its batches smaller until they fit"  # where `least` alone fits
    on_host: float = 0  # bytes at most of the machine's own memory, besides

    @property
    def placed(self) -> str:
        """The stage of the flow that does this."""
        return WITHIN.get(self.stage, self.stage if self.stage in PLACED else "train")

    @property
    def fits(self) -> bool:
        return self.device.room is None or self.least.total * self.on_device <= self.device.room

    @property
    def fits_at_once(self) -> bool:
        """Whether it fits without smaller batches."""
        return self.device.room is None or self.memory.total * self.on_device <= self.device.room
