"""Checkpoints: safetensors files, whole or absent; nothing is ever unpickled.

A checkpoint holds all that a resume needs to end with the same weights: named tensors (heads,
optimizer) and, in its header, a JSON state (step, running sums) and a digest of all this. The first
worker writes it, and every worker reads it, however many there are. Training waits for a copy
alone, of a GPU into pinned memory that all copies share; hashing and writing, for which 30 GB of
state take a minute, go on in the background. A damaged checkpoint (its digest disagrees) falls back
to the one before.
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
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.config import TrainConfig
from pipeline.storage.atomic import atomic_path
from pipeline.training.task import Workers

State = dict[str, Any]
Content = tuple[dict[str, Tensor], State]
FILE = re.compile(r"step-([0-9]{8,})\.safetensors")
log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one training directory; a context, so that leaving it awaits the last
    write.

    Args:
        settings: How often they are due, and how many stay.
    """

    def __init__(self, directory: Path, settings: TrainConfig):
        self.directory, self.settings = directory, settings
        self._background = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self._saved = time.monotonic()
        self._room: dict[str, Tensor] = {}  # for copies, by name
        self._verified: tuple[int, Content] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._background.shutdown()
        if kind is None:
            self.wait()

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}.safetensors"

    def saved(self) -> list[int]:
        """The steps of all checkpoints, newest first."""
        names = [FILE.fullmatch(path.name) for path in self.directory.glob("step-*")]
        return sorted((int(match[1]) for match in names if match), reverse=True)

    def due(self, step: int) -> bool:
        """Whether one is to be saved after this step: after so many steps, or after so long."""
        if self.settings.checkpoint_every:
            return step % self.settings.checkpoint_every == 0
        return time.monotonic() - self._saved >= 60 * self.settings.checkpoint_minutes

    def save(self, step: int, tensors: Mapping[str, Tensor], state: State) -> None:
        """Copy everything now and write it in the background; awaits (and reports) the write before
        it.

        Raises:
            EnvironmentFault: The disk was full at the write before.
        """
        self.wait()
        self._saved, self._verified = time.monotonic(), None
        copies = {name: self._copy(name, tensor.detach()) for name, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        self._writing = self._background.submit(self._write, step, copies, json.dumps(state))

    def wait(self) -> None:
        """Until the last write is on disk."""
        if self._writing:
            self._writing.result()
        self._writing = None

    def newest(self, workers: Workers, device: torch.device) -> int | None:
        """The step of the newest checkpoint that is whole, None without one.

        The first worker looks for it, and all go back to the same.
        """
        found = 0
        if workers.is_first:
            found = self._newest_whole()
        (step,) = workers.firsts([found], device)
        return step or None

    def load(self, step: int) -> Content:
        """The tensors, on the CPU, and the state of a checkpoint that `newest`, here or elsewhere,
        verified.
        """
        verified, self._verified = self._verified, None
        if verified and verified[0] == step:
            return verified[1]
        found = read_checkpoint(self.path(step), verify=False)
        assert found is not None, f"the checkpoint of step {step} was whole a moment ago"
        return found

    def _newest_whole(self) -> int:
        for step in self.saved():
            content = read_checkpoint(self.path(step))
            if content:
                self._verified = (step, content)
                return step
        return 0

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """A copy on the CPU, where the last one of this name was; a GPU's has begun."""
        room = self._room.get(name)
        if room is None or (room.shape, room.dtype) != (tensor.shape, tensor.dtype):
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._room[name] = room
        return room.copy_(tensor, non_blocking=True)

    def _write(self, step: int, tensors: dict[str, Tensor], state: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.path(step)
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, {"state": state, "sha256": digest(tensors, state)})
        self._forget(step)

    def _forget(self, step: int) -> None:
        """Remove what is older than the newest to be kept, or newer than this step: damaged, or
        another history's.
        """
        saved = self.saved()
        history = [each for each in saved if each <= step]
        for each in set(saved) - set(history[: self.settings.keep_checkpoints]):
            self.path(each).unlink(missing_ok=True)


def read_checkpoint(path: Path, *, verify: bool = True) -> Content | None:
    """A checkpoint's tensors and state; None, with a warning, where it is damaged."""
    with contextlib.suppress(OSError, SafetensorError, KeyError, ValueError):
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dictionary)
        if not verify or digest(tensors, metadata["state"]) == metadata["sha256"]:
            return tensors, json.loads(metadata["state"])
    log.warning("The checkpoint %s is damaged: the one before it is used.", path)
    return None


def digest(tensors: Mapping[str, Tensor], state: str) -> str:
    """The sha256 (hex) of names, dtypes, shapes and bytes of CPU tensors, and of the state."""
    total = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
