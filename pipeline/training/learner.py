"""What the trainer asks of one training: what trains, which batches a step reads, what they lose,
what is written.

Letters: C components of the loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pipeline.config import TrainConfig
from pipeline.heads.kind import Heads
from pipeline.training.optimizers import cosine_with_warmup
from pipeline.training.recipe import Recipe
from pipeline.training.task import TrainSpec, Workers, product_dtype


class Learner(ABC):
    """What one phase of training learns, and from what.

    A subclass's `__init__` reads what is trained from and sets the attributes below; it raises
    DataError for bad data. Torch's generator is seeded before it is called, alike on every worker.

    Args:
        spec: With the directory of this phase.
        device: Where to compute.
        heads_from: A file of heads to start from, those of the phase before.
    """

    tunes_backbone: ClassVar[bool] = (
        False  # whether the backbone trains too, and so is on the device
    )
    saves_memory: ClassVar[
        tuple[str, ...]
    ]  # settings with which a worker takes less, those first that help most

    heads: Heads
    modules: dict[
        str, nn.Module
    ]  # what trains, on the device, by the name that checkpoints give it
    peak_lrs: dict[str, float]  # of each module
    recipe: Recipe  # `auto` resolved, alike on every worker
    held_out_share: float  # positions of one evaluation over those of one epoch

    def __init__(
        self,
        spec: TrainSpec,
        workers: Workers,
        device: torch.device,
        heads_from: Path | None = None,
    ):
        self.spec, self.workers, self.device = spec, workers, device

    @classmethod
    @abstractmethod
    def recipe_of(cls, spec: TrainSpec) -> Recipe:
        """The recipe of the phase; reads what it trains from, and raises DataError where that is
        bad.
        """

    @classmethod
    @abstractmethod
    def expected_recipe(
        cls, settings: TrainConfig, positions: int, hidden_size: int, lr_scale: float
    ) -> Recipe:
        """The recipe for so many target-written positions, before they are there; arguments as of
        `heads_recipe`.
        """

    @property
    def total_steps(self) -> int:
        return self.recipe.total_steps

    @property
    def steps_per_epoch(self) -> int:
        return self.recipe.steps_per_epoch

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
        warmup_steps = min(
            self.recipe.warmup_steps, self.total_steps // 2
        )  # the peak is reached in any case
        return cosine_with_warmup(step, self.total_steps, warmup_steps)

    @abstractmethod
    def figures(self, step: int, means: list[float]) -> dict[str, Any]:
        """How metrics.jsonl names the components' means [C] of a step, and what else it says of
        it.
        """

    @abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """Figures on held-out text, all workers together: `held_out`, one entry per head, and
        others.
        """

    def evaluates_after(self, step: int) -> bool:
        """Whether this step is followed by an evaluation: at the end of each epoch, and of equal
        parts of it.
        """
        parts = self.recipe.evaluations_per_epoch(self.held_out_share)
        done = step % self.steps_per_epoch
        return (
            done == 0
            or done * parts // self.steps_per_epoch > (done - 1) * parts // self.steps_per_epoch
        )

    def held_out_loss(self, figures: dict[str, Any]) -> float | None:
        """What the best state has least of: the heads' held-out losses, each weighed by
        decay^(k+1).

        None where nothing is held out.
        """
        heads, decay = figures["held_out"], self.spec.settings.decay
        return (
            sum(decay ** (k + 1) * head["loss"] for k, head in enumerate(heads)) if heads else None
        )

    def facts(self) -> dict[str, Any]:
        """What the summary says besides how training went."""
        return {}

    def write(self) -> None:  # noqa: B027  (most leave nothing)
        """Write what training leaves beside the heads; the first worker does."""

    def autocast(self) -> torch.autocast:
        dtype = product_dtype(self.spec, self.device)
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)
