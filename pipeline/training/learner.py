"""What the trainer asks of one training: what trains, which batches a step reads, what they lose, what is written.

Letters: C components of the loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pipeline.heads.kind import Heads
from pipeline.training.optimizers import cosine_with_warmup
from pipeline.training.task import TrainSpec, Workers, product_dtype


class Learner(ABC):
    """What one phase of training learns, and from what.

    A subclass's `__init__` reads what is trained from and sets the attributes below; it raises DataError for bad data.
    Torch's generator is seeded before it is called, alike on every worker.

    Args:
        spec: With the directory of this phase.
        device: Where to compute.
        heads_from: A file of heads to start from, those of the phase before.
    """

    memory_fix: ClassVar[str]  # what to do where a GPU's memory is too small

    heads: Heads
    modules: dict[str, nn.Module]  # what trains, on the device, by the name that checkpoints give it
    peak_lrs: dict[str, float]  # of each module
    steps_per_epoch: int

    def __init__(self, spec: TrainSpec, workers: Workers, device: torch.device, heads_from: Path | None = None):
        self.spec, self.workers, self.device = spec, workers, device

    @classmethod
    @abstractmethod
    def count_steps(cls, spec: TrainSpec) -> int:
        """Optimizer steps of the whole phase; reads what it trains from, and raises DataError where that is bad."""

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.spec.settings.epochs

    @abstractmethod
    def steps(self, first: int) -> Iterator[Sequence[Any]]:
        """This worker's micro-batches of every step from `first` to the last; on any device."""

    @abstractmethod
    def label_counts(self, batches: Sequence[Any]) -> Tensor:
        """How many labels each component of the loss has in these micro-batches: int64 [C]."""

    @abstractmethod
    def loss_weights(self, step: int) -> Tensor:
        """What each component weighs in the loss: [C]."""

    @abstractmethod
    def summed_losses(self, batch: Any, weights_C: Tensor) -> Tensor:
        """Each component summed over the micro-batch's labels, differentiable: [C].

        The trainer weighs the sums by `weights_C`, exactly.
        """

    def lr_share(self, step: int) -> float:
        """The share of its peak that every learning rate has: linear warmup, then half a cosine."""
        warmup_steps = min(self.spec.settings.warmup_steps, self.total_steps // 2)  # the peak is reached in any case
        return cosine_with_warmup(step, self.total_steps, warmup_steps)

    @abstractmethod
    def figures(self, step: int, means: list[float]) -> dict[str, Any]:
        """How metrics.jsonl names the components' means [C] of a step, and what else it says of it."""

    @abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """Figures on held-out text, all workers together: `held_out`, one entry per head, and others."""

    def facts(self) -> dict[str, Any]:
        """What the summary says besides how training went."""
        return {}

    def write(self) -> None:  # noqa: B027  (most leave nothing)
        """Write what training leaves beside the heads; the first worker does."""

    def autocast(self) -> torch.autocast:
        dtype = product_dtype(self.spec, self.device)
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)
