"""What a training is asked to do, as plain data that travels to its workers; and the workers that
share it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.artifacts.trained_heads import HEADS_FILE
from pipeline.config import TrainConfig
from pipeline.errors import EnvironmentFault
from pipeline.heads.kind import Heads
from pipeline.heads.shapes import HeadsShape
from pipeline.targets.spec import TargetSpec, first_lines
from pipeline.training.methods import Method
from pipeline.training.trackers import Watched


@dataclass(frozen=True)
class TrainSpec:
    """All that a worker needs to know; picklable. It carries kind and method, so that workers look
    neither up.
    """

    shards: tuple[
        str, ...
    ]  # the features stage's shards, in order; none where nothing is trained from the cache
    fingerprint: str  # of the features stage
    settings: TrainConfig
    kind: type[Heads]
    method: Method
    target: TargetSpec
    hidden_size: int
    vocab_size: int
    seed: int
    directory: str  # of the train stage, on storage that every worker sees
    device: Literal["auto", "cpu", "cuda"] = "auto"
    texts: tuple[str, ...] = ()  # the generate stage's shards, in order: what Medusa-2 trains from
    texts_fingerprint: str = ""
    run_name: str = "run"
    phase: str = ""  # of several trainings, one after another; empty for the last
    configuration: Mapping[str, Any] = field(
        default_factory=dict
    )  # of the run, for those that watch it

    @property
    def watched(self) -> Watched:
        """This training as trackers see it."""
        return Watched(
            "-".join(filter(None, (self.run_name, self.phase))), self.path, self.configuration
        )

    @property
    def path(self) -> Path:
        return Path(self.directory)

    @property
    def heads_path(self) -> Path:
        """Where the trained heads will be; heads of `heads_shape` there say that training is
        finished.
        """
        return self.path / HEADS_FILE

    @property
    def adapter_path(self) -> Path:
        """Where Medusa-2 leaves the backbone's adapter, as peft reads it."""
        return self.path / "adapter"

    @property
    def trained_target(self) -> TargetSpec:
        """The target as Medusa-2 trains it: its copy in `train.backbone.quantization`."""
        return replace(
            self.target,
            quantization=self.settings.backbone.quantization_beside(self.target.quantization),
        )

    @property
    def heads_shape(self) -> HeadsShape:
        """The shape of the heads that are asked for."""
        shape = self.kind.shape_of(self.settings, self.hidden_size, self.vocab_size)
        return shape.drafting(self.settings.draft_vocab)


@dataclass(frozen=True)
class Workers:
    """The workers of one training; this one is `rank` of `world_size`.

    With more than one, torch.distributed is initialised already.
    """

    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Until every worker has come here."""
        if self.world_size > 1:
            dist.barrier()

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all workers, in place; bitwise the same on each."""
        self.sum_all([tensor])
        return tensor

    def firsts(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """The first worker's numbers, on every worker."""
        mine = numbers if self.is_first else [0] * len(numbers)
        return self.sum(torch.tensor(mine, dtype=torch.int64, device=device)).tolist()

    def sum_all(self, tensors: Iterable[Tensor]) -> None:
        """Sum each tensor over all workers, in place, all in flight at once.

        The heads' parameters are stacked, so their gradients are few and large; LoRA's are small,
        and many.
        """
        if self.world_size > 1:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()


def choose_device(spec: TrainSpec) -> torch.device:
    """The worker's device; a GPU is the one that it was given.

    Raises:
        EnvironmentFault: A GPU is asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if spec.device == "cuda" and not has_gpu:
        fix = (
            "Install torch with CUDA and check nvidia-smi, or set"
            " placement.train.gpus_per_worker: 0."
        )
        raise EnvironmentFault(
            "Training is to run on a GPU, and none is visible.", "placement.train", fix
        )
    if has_gpu and spec.device != "cpu":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextlib.contextmanager
def gpu_errors(spec: TrainSpec, saves_memory: Sequence[str]) -> Iterator[None]:
    """Turn "out of memory", and what a GPU has no kernel for, into one readable error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = "The GPU's memory is too small for this training."
        fix = f"What helps most: {', '.join([*spec.kind.saves_memory, *saves_memory])}."
        raise EnvironmentFault(what, spec.directory, fix) from error
    except torch.AcceleratorError as error:
        what = f"The GPU cannot compute this training: {first_lines(error)}."
        raise EnvironmentFault(
            what, spec.directory, "Set train.precision: fp32, or train on a newer GPU."
        ) from error


def product_dtype(spec: TrainSpec, device: torch.device) -> torch.dtype:
    """In what matrix products run; weights, sums and softmax are fp32 in any case."""
    if spec.settings.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[spec.settings.precision]
