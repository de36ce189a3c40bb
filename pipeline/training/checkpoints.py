"""Checkpoints: one safetensors file each, whole or absent; nothing is ever unpickled.

A checkpoint holds all that a resume needs to end with the same weights: named tensors (heads, optimizer) and, in its
header, a JSON state (step, running sums) and a digest. It is written in the background from a copy, since 8 GB of
state take seconds; a damaged one (its digest disagrees) falls back to the one before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.storage.atomic import atomic_path

State = dict[str, Any]
log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one training directory; a context, so that leaving it awaits the last write."""

    def __init__(self, directory: Path, keep: int):
        self.directory, self.keep = directory, keep
        self._background = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

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
        paths = self.directory.glob("step-*.safetensors")
        return sorted((int(path.stem.removeprefix("step-")) for path in paths), reverse=True)

    def save(self, step: int, tensors: Mapping[str, Tensor], state: State) -> None:
        """Copy everything now and write it in the background; awaits (and reports) the write before it.

        Raises:
            EnvironmentFault: The disk was full at the write before.
        """
        self.wait()
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        self._writing = self._background.submit(self._write, step, copies, json.dumps(state))

    def wait(self) -> None:
        """Until the last write is on disk."""
        if self._writing:
            self._writing.result()
        self._writing = None

    def newest(self) -> int:
        """The newest step whose checkpoint is whole, 0 without one."""
        return next((step for step in self.steps() if read_checkpoint(self.path(step))), 0)

    def load(self, step: int) -> tuple[dict[str, Tensor], State]:
        """The tensors, on the CPU, and the state of one step's checkpoint, as `newest` found it."""
        found = read_checkpoint(self.path(step))
        assert found is not None, f"the checkpoint of step {step} was whole a moment ago"
        return found

    def _write(self, step: int, tensors: dict[str, Tensor], state: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with atomic_path(self.path(step)) as temporary:
            save_file(tensors, temporary, {"state": state, "sha256": digest(tensors, state)})
        whole = [other for other in self.steps() if other <= step]  # later ones were damaged, or are another history's
        for other in set(self.steps()) - set(whole[: self.keep]):
            self.path(other).unlink(missing_ok=True)


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], State] | None:
    """A checkpoint's tensors and state; None, with a warning, where it is damaged."""
    with contextlib.suppress(OSError, SafetensorError, KeyError, ValueError), safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dictionary)
        if digest(tensors, metadata["state"]) == metadata["sha256"]:
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
