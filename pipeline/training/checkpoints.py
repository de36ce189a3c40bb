"""Training checkpoints: atomically written safetensors files, without pickle.

A checkpoint holds everything that a resumed training needs to end with the same weights: named
tensors (weights, optimizer) and, in the file's header, a JSON state (step, running sums) and a
sha256 of both. The first worker writes checkpoints and every worker reads them; a resume may have
another number of workers. Training waits only for a copy of the tensors; hashing and writing (a
minute for 30 GB) run in the background. If the newest checkpoint is damaged, the previous one is
used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.config import TrainConfig
from pipeline.storage.atomic import atomic_path
from pipeline.training.task import Workers

KEPT = 2  # the newest checkpoints on disk

FILE = re.compile(r"step-([0-9]{8,})\.safetensors")
log = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """A training checkpoint: tensors on the CPU and the JSON state."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints in a directory; a context manager that waits for the last write.

    Args:
        directory: The directory of the checkpoints; created by the first write.
        settings: The `train` settings, with how often a checkpoint is due and how many are kept.
    """

    def __init__(self, directory: Path, settings: TrainConfig):
        self.directory = directory
        self.settings = settings
        self._background = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self._saved = time.monotonic()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._background.shutdown()
        if kind is None:
            self.wait()

    def path(self, step: int) -> Path:
        """Return the path of the training checkpoint of a step."""
        return self.directory / f"step-{step:08d}.safetensors"

    def saved_steps(self) -> list[int]:
        """Return the training steps that have a checkpoint, newest first."""
        names = [FILE.fullmatch(path.name) for path in self.directory.glob("step-*")]
        return sorted((int(match[1]) for match in names if match), reverse=True)

    def is_due(self, step: int) -> bool:
        """Return whether to save a checkpoint after this step.

        A checkpoint is due every `checkpoint_every` steps or, if that is None, `checkpoint_minutes`
        after the last one.
        """
        if self.settings.checkpoint_every:
            return step % self.settings.checkpoint_every == 0
        return time.monotonic() - self._saved >= 60 * self.settings.checkpoint_minutes

    def save(self, step: int, checkpoint: Checkpoint) -> None:
        """Copy the training state now and write its checkpoint in the background.

        Waits until the previous checkpoint is written.

        Raises:
            EnvironmentFault: The disk was full when the previous checkpoint was written.
        """
        self.wait()
        self._saved = time.monotonic()
        copies = {}
        for name, tensor in checkpoint.tensors.items():
            copies[name] = tensor.detach().to("cpu", copy=True)
        state = json.dumps(checkpoint.state)
        self._writing = self._background.submit(self._write, step, copies, state)

    def wait(self) -> None:
        """Wait until the last training checkpoint is on disk; raise the error of a failed write."""
        if self._writing:
            self._writing.result()
        self._writing = None

    def read_newest(self, workers: Workers, device: torch.device) -> Checkpoint | None:
        """Read the newest undamaged checkpoint, the same on every worker; None if there is none.

        All workers must call this together. The first worker chooses the checkpoint.
        """
        newest = 0
        checkpoint = None
        if workers.is_first:
            for step in self.saved_steps():
                checkpoint = read_checkpoint(self.path(step))
                if checkpoint is not None:
                    newest = step
                    break
        newest = workers.from_first(newest, device)
        if newest and not workers.is_first:
            checkpoint = read_checkpoint(self.path(newest))
            assert checkpoint is not None, f"the first worker has read the checkpoint {newest}"
        return checkpoint

    def _write(self, step: int, tensors: dict[str, Tensor], state: str) -> None:
        """Write a checkpoint, and delete checkpoints that are not kept.

        The newest `KEPT` are kept, this one included. Checkpoints of later steps are
        deleted.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with atomic_path(self.path(step)) as temporary:
            save_file(
                tensors, temporary, {"state": state, "sha256": checkpoint_digest(tensors, state)}
            )
        # Checkpoints of later steps are damaged or older than the last resume.
        saved = self.saved_steps()
        history = [each for each in saved if each <= step]
        for each in set(saved) - set(history[:KEPT]):
            self.path(each).unlink(missing_ok=True)


def read_checkpoint(path: Path) -> Checkpoint | None:
    """Read and verify a training checkpoint; log a warning and return None if it is damaged."""
    with contextlib.suppress(OSError, SafetensorError, KeyError, ValueError):
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dictionary)
        if checkpoint_digest(tensors, metadata["state"]) == metadata["sha256"]:
            return Checkpoint(tensors, json.loads(metadata["state"]))
    log.warning("The checkpoint %s is damaged: the one before it is used.", path)
    return None


def checkpoint_digest(tensors: Mapping[str, Tensor], state: str) -> str:
    """Return a checkpoint's sha256 over state and tensors (name, dtype, shape, bytes), in hex."""
    total = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def optimizer_state(
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[str, Tensor], dict[str, int | float]]:
    """Return the optimizer's state for a checkpoint: tensors and numbers by `{index}.{name}`.

    The index is the parameter's, over all groups; the name is the optimizer's, such as `exp_avg`.
    """
    tensors = {}
    numbers = {}
    for index, parameter in enumerate(_optimizer_parameters(optimizer)):
        for name, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value
            else:
                numbers[f"{index}.{name}"] = value
    return tensors, numbers


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, int | float],
) -> None:
    """Load the result of `optimizer_state` into an optimizer, in place.

    Learning rates and weight decays are not part of it and stay as they are.
    """
    parameters = _optimizer_parameters(optimizer)
    for key, value in (*tensors.items(), *numbers.items()):
        index, _, name = key.partition(".")
        optimizer.state[parameters[int(index)]][name] = value


def _optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters of the optimizer, in the order of its groups."""
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters
