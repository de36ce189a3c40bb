"""Specification, result and workers of a training, and the `Learner` interface of its phases.

Letters: C components of the loss.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.artifacts.json_form import result, to_json
from pipeline.artifacts.trained_heads import HEADS_FILE
from pipeline.config import TrainConfig
from pipeline.config.training import Bits
from pipeline.errors import EnvironmentFault
from pipeline.heads.kind import Heads
from pipeline.heads.shapes import HeadsShape
from pipeline.storage.receipts import Summary
from pipeline.targets.spec import TargetSpec, one_line
from pipeline.training.held_out_accuracy import Evaluation
from pipeline.training.optimizers import cosine_with_warmup
from pipeline.training.recipe import Recipe, make_recipe, packed_length

StepMetrics = dict[str, float | list[float]]
"""Figures of one training step; a list has an entry per head."""


@dataclass(frozen=True)
class TrainSpec:
    """Specification of one training, sent to its workers; picklable."""

    shards: tuple[Path, ...]  # of the features stage, in order; empty if the cache is not read
    fingerprint: str  # of the features stage
    settings: TrainConfig
    kind: type[Heads]
    phases: Phases
    target: TargetSpec
    hidden_size: int
    vocab_size: int
    seed: int
    directory: str  # of the train stage, on storage that every worker sees
    device: Literal["cpu", "cuda"] = "cpu"
    texts: tuple[Path, ...] = ()  # the generate stage's shards, in order
    texts_fingerprint: str = ""
    row_shards: tuple[Path, ...] = ()  # of the row-features stage, for kinds with `row_layers`
    row_fingerprint: str = ""
    num_layers: int = 1  # of the target
    run_name: str = "run"  # in trackers
    configuration: dict[str, object] = field(default_factory=dict)  # of the run, for trackers
    heads_from: Path | None = None  # heads of the previous phase, to start from

    @property
    def path(self) -> Path:
        """The directory of this training."""
        return Path(self.directory)

    @property
    def heads_path(self) -> Path:
        """The path of the heads file that this training writes when it is finished."""
        return self.path / HEADS_FILE

    @property
    def adapter_path(self) -> Path:
        """The directory of the LoRA adapter that Medusa-2 trains."""
        return self.path / "adapter"

    @property
    def trained_target(self) -> TargetSpec:
        """The target as Medusa-2 training loads it.

        Its quantization is `train.backbone.quantization`, or `target.quantization` if that is not
        set.
        """
        bits = self.settings.backbone.quantization_beside(self.target.quantization)
        return replace(self.target, quantization=bits)

    @property
    def heads_shape(self) -> HeadsShape:
        """The shape of the heads that this training trains."""
        shape = self.kind.shape_of(
            self.settings, self.hidden_size, self.vocab_size, self.num_layers
        )
        return shape.drafting(self.settings.draft_vocab)

    def of_phase(self, name: str, heads_from: Path | None = None) -> TrainSpec:
        """Return the specification of one training phase, in the subdirectory `name`.

        The last phase's name is empty; its directory is the training's own. `heads_from` is the
        path of the heads to start from.
        """
        run_name = f"{self.run_name}-{name}" if name else self.run_name
        directory = str(self.path / name)
        return replace(self, directory=directory, run_name=run_name, heads_from=heads_from)

    def recipe(
        self, positions: int, sequences: int | None = None, rows: int | None = None
    ) -> Recipe:
        """Return the training recipe for these numbers of positions, packed sequences and rows."""
        return make_recipe(self.settings, positions, self.hidden_size, self.kind, sequences, rows)


@result
class TrainResult(Evaluation):
    """The result of one training, with the evaluation at the lowest held-out loss."""

    steps: int
    tokens: int  # positions, over all workers and epochs
    seconds: float
    tokens_per_second: float
    final_loss: float  # mean over the last steps
    best_step: int | None = None  # None if nothing is held out
    hyperparameters: Recipe
    quantization: Bits | None = None  # of the backbone that the drift is measured from
    warnings: list[str] = field(default_factory=list)
    earlier: dict[str, TrainResult] = field(default_factory=dict)  # of earlier phases, by name

    def to_json(self) -> Summary:
        """Return the training result as plain data, with each earlier phase under its own name.

        `warnings` is left out if there are none.
        """
        data = to_json(self)
        del data["earlier"]
        if not self.warnings:
            del data["warnings"]
        for name, phase in self.earlier.items():
            data[name] = phase.to_json()
        return data


@dataclass(frozen=True)
class Workers:
    """The workers of one training; this one is `rank` of `world_size`.

    With more than one worker, torch.distributed has to be initialized.
    """

    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the training worker that writes files and logs."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until every training worker has called this."""
        if self.world_size > 1:
            dist.barrier()

    def sum_in_place(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all training workers, the same bits on each worker."""
        if self.world_size > 1:
            dist.all_reduce(tensor)

    def from_first(self, number: int, device: torch.device) -> int:
        """Return the first training worker's `number` on every worker."""
        if self.world_size == 1:
            return number
        sent = torch.tensor(number, dtype=torch.int64, device=device)
        dist.broadcast(sent, src=0)
        return int(sent)


ALONE = Workers()


class Learner(ABC):
    """Interface of one training phase: modules, batches, losses, evaluation and output.

    A subclass's `__init__` reads the training data and sets the attributes below. The trainer seeds
    torch's generator before, equally on every worker.

    Args:
        spec: The phase's specification.
        workers: The workers of the training.
        device: The device to compute on.

    Raises:
        DataError: The training data is damaged, belongs to another run, or is empty.
    """

    tunes_backbone: ClassVar[bool] = False
    saves_memory: ClassVar[tuple[str, ...]]  # settings that reduce a worker's memory, best first

    heads: Heads
    modules: dict[str, nn.Module]  # the trained ones, by their name in checkpoints
    peak_lrs: dict[str, float]  # of each module
    recipe: Recipe  # `auto` resolved, equal on every worker
    held_out_share: float  # positions of one evaluation over positions of one epoch

    def __init__(self, spec: TrainSpec, workers: Workers, device: torch.device):
        self.spec = spec
        self.workers = workers
        self.device = device
        self.dtype = product_dtype(spec.settings, device)

    @classmethod
    @abstractmethod
    def recipe_of(cls, spec: TrainSpec) -> Recipe:
        """Read the training data and return the phase's recipe; raise DataError for bad data."""

    @classmethod
    def expected_recipe(
        cls, settings: TrainConfig, positions: int, hidden_size: int, kind: type[Heads]
    ) -> Recipe:
        """Estimate the training recipe from a number of positions, without reading data.

        The estimate for Medusa-2 assumes that every token of a packed sequence is learned from. The
        real recipe usually has more steps, since prompts take up tokens too.
        """
        sequences = None
        if cls.tunes_backbone:
            sequences = -(-positions // packed_length(settings, positions, positions, kind))
        return make_recipe(settings, positions, hidden_size, kind, sequences)

    @abstractmethod
    def steps(self, first: int) -> Iterator[Sequence[Any]]:
        """Yield this worker's sequence of micro-batches for each training step from `first` on."""

    @abstractmethod
    def label_counts(self, batches: Sequence[Any]) -> Tensor:
        """Count the labels of each loss component in this worker's micro-batches, int64 [C]."""

    @abstractmethod
    def loss_weights(self, step: int) -> Tensor:
        """Return the weight of each loss component in this training step, [C]."""

    @abstractmethod
    def loss(self, batch: Any, weights_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return the micro-batch's loss and the sum of each component over its labels [C].

        The loss is the sum of the components, each times its weight; the sums are detached.
        """

    def lr_share(self, step: int) -> float:
        """Return the factor on all peak learning rates: linear warmup, then cosine decay.

        Warmup takes at most half of the training steps.
        """
        total = self.recipe.total_steps
        warmup_steps = min(self.recipe.warmup_steps, total // 2)  # the peak is always reached
        return cosine_with_warmup(step, total, warmup_steps)

    @abstractmethod
    def metrics(self, step: int, means: list[float]) -> StepMetrics:
        """Return the metrics of a training step, given the mean of each loss component."""

    @abstractmethod
    def evaluate(self) -> Evaluation:
        """Evaluate the trained modules on held-out text; all workers call this together."""

    def write(self) -> None:  # noqa: B027  (most write nothing)
        """Write the training's outputs other than the heads; called on the first worker."""

    def autocast(self) -> torch.autocast:
        """Return the autocast context of training's matrix products, in `self.dtype`."""
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype, enabled=enabled)


Phases = tuple[tuple[str, type[Learner]], ...]
"""The trainings of a method in order, each with the name of its directory; the last has no name."""


def choose_device(spec: TrainSpec) -> torch.device:
    """Return the device that this training worker computes on.

    Raises:
        EnvironmentFault: A GPU is required and none is visible.
    """
    if spec.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EnvironmentFault(
            "Training needs a GPU, and none is visible.",
            "placement.train",
            "Install torch with CUDA and check nvidia-smi, or set"
            " placement.train.gpus_per_worker: 0.",
        )
    return torch.device("cuda", torch.cuda.current_device())


@contextlib.contextmanager
def gpu_errors(spec: TrainSpec, saves_memory: Sequence[str]) -> Iterator[None]:
    """Context manager that converts CUDA out-of-memory and kernel errors to EnvironmentFault.

    The error suggests the settings `saves_memory` and the settings of the kind of heads.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        settings = ", ".join([*spec.kind.saves_memory, *saves_memory])
        raise EnvironmentFault(
            f"The GPU cannot compute this training: {one_line(error)}.",
            spec.directory,
            f"If memory is too small, set {settings}; if a kernel is missing, set"
            " train.precision: fp32.",
        ) from error


def product_dtype(settings: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products in training; weights, sums and softmax are fp32."""
    precision = settings.precision
    if precision == "bf16" or (precision == "auto" and device.type == "cuda"):
        return torch.bfloat16
    return torch.float32
