"""Checkpoints: one safetensors file each, whole or absent; nothing is ever unpickled.

A checkpoint holds all that a resume needs to end with the same weights: named tensors (heads, optimizer) and, in its
header, a JSON state (step, running sums) and a digest. Training waits for a copy alone, of a GPU's into pinned memory
that all copies share; hashing and writing, for which 30 GB of state take a minute, go on in the background. A damaged
one (its digest disagrees) falls back to the one before.
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

State = dict[str, Any]
log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one training directory; a context, so that leaving it awaits the last write.

    Args:
        settings: How often they are due, and how many stay.
    """

    def __init__(self, directory: Path, settings: TrainConfig):
        self.directory, self.settings = directory, settings
        self._background = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self._saved = time.monotonic()
        self._room: dict[str, Tensor] = {}  # for copies, by name
        self._verified: tuple[int, tuple[dict[str, Tensor], State]] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._background.shutdown()
        if kind is None:
            self.wait()

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}.safetensors"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, newest first."""
        found = (re.fullmatch(r"step-([0-9]{8,})\.safetensors", path.name) for path in self.directory.glob("step-*"))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def due(self, step: int) -> bool:
        """Whether one is to be saved after this step: after so many steps, or after so long."""
        if self.settings.checkpoint_every:
            return step % self.settings.checkpoint_every == 0
        return time.monotonic() - self._saved >= 60 * self.settings.checkpoint_minutes

    def save(self, step: int, tensors: Mapping[str, Tensor], state: State) -> None:
        """Copy everything now and write it in the background; awaits (and reports) the write before it.

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

    def newest(self) -> int:
        """The newest step whose checkpoint is whole, 0 without one."""
        for step in self.steps():
            if found := read_checkpoint(self.path(step)):
                self._verified = step, found
                return step
        return 0

    def load(self, step: int) -> tuple[dict[str, Tensor], State]:
        """The tensors, on the CPU, and the state of one step's checkpoint; `newest`, here or elsewhere, verified it."""
        verified, self._verified = self._verified, None
        found = verified[1] if verified and verified[0] == step else read_checkpoint(self.path(step), verify=False)
        assert found is not None, f"the checkpoint of step {step} was whole a moment ago"
        return found

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """A copy on the CPU, where the last one of this name was; a GPU's has begun."""
        room = self._room.get(name)
        if room is None or (room.shape, room.dtype) != (tensor.shape, tensor.dtype):
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._room[name] = room
        return room.copy_(tensor, non_blocking=True)

    def _write(self, step: int, tensors: dict[str, Tensor], state: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with atomic_path(self.path(step)) as temporary:
            save_file(tensors, temporary, {"state": state, "sha256": digest(tensors, state)})
        whole = [other for other in self.steps() if other <= step]  # later ones were damaged, or are another history's
        for other in set(self.steps()) - set(whole[: self.settings.keep_checkpoints]):
            self.path(other).unlink(missing_ok=True)


def read_checkpoint(path: Path, *, verify: bool = True) -> tuple[dict[str, Tensor], State] | None:
    """A checkpoint's tensors and state; None, with a warning, where it is damaged."""
    with contextlib.suppress(OSError, SafetensorError, KeyError, ValueError), safe_open(path, "pt") as file:
        metadata = file.metadata()
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
