"""Checkpoints: safetensors files, whole or absent; nothing is ever unpickled.

A checkpoint holds all that a resume needs to end with the same weights: named tensors (heads, optimizer) and, in its
header, a JSON state (step, running sums) and a digest of all this. It is one file, which the first worker writes; where
heads are split over the workers each writes a file of its part, and a checkpoint is whole once all are. Training waits
for a copy alone, of a GPU into pinned memory that all copies share; hashing and writing, for which 30 GB of state take
a minute, go on in the background. A damaged one (a digest disagrees) falls back to the one before. Another number of
workers continues from it too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.config import TrainConfig
from pipeline.storage.atomic import atomic_path
from pipeline.training.resplit import RowsOf, resplit
from pipeline.training.task import Workers

State = dict[str, Any]
Content = tuple[dict[str, Tensor], State]
FILE = re.compile(r"step-([0-9]{8,})(?:\.[0-9]+-of-([0-9]+))?\.safetensors")
log = logging.getLogger(__name__)


class Saved(NamedTuple):
    """A checkpoint: after this step, in so many files."""

    step: int
    parts: int = 1

    def path(self, directory: Path, part: int = 0) -> Path:
        """The file of one part."""
        of = f".{part + 1}-of-{self.parts}" if self.parts > 1 else ""
        return directory / f"step-{self.step:08d}{of}.safetensors"

    def paths(self, directory: Path) -> list[Path]:
        return [self.path(directory, part) for part in range(self.parts)]


class Checkpoints:
    """The checkpoints of one training directory; a context, so that leaving it awaits the last write.

    Args:
        settings: How often they are due, and how many stay.
        workers: Those that have a part each; none where the first has all.
    """

    def __init__(self, directory: Path, settings: TrainConfig, workers: Workers | None = None):
        self.directory, self.settings = directory, settings
        self.parts = workers or Workers()
        self._background = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self._saved = time.monotonic()
        self._room: dict[str, Tensor] = {}  # for copies, by name
        self._verified: tuple[Saved, Content] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._background.shutdown()
        if kind is None:
            self.wait()

    def saved(self) -> list[Saved]:
        """The checkpoints of which every file is there, newest first."""
        names = (FILE.fullmatch(path.name) for path in self.directory.glob("step-*"))
        found = Counter(Saved(int(match[1]), int(match[2] or 1)) for match in names if match)
        return sorted((each for each, number in found.items() if number == each.parts), reverse=True)

    def due(self, step: int) -> bool:
        """Whether one is to be saved after this step: after so many steps, or after so long."""
        if self.settings.checkpoint_every:
            return step % self.settings.checkpoint_every == 0
        return time.monotonic() - self._saved >= 60 * self.settings.checkpoint_minutes

    def save(self, step: int, tensors: Mapping[str, Tensor], state: State) -> None:
        """Copy everything now and write it in the background; awaits (and reports) the write before it.

        Of parts, every worker's write before it: checkpoints that this one makes superfluous are removed then.

        Raises:
            EnvironmentFault: The disk was full at the write before.
        """
        self.wait()
        self.parts.wait()
        if self.parts.world_size > 1:
            self._forget(step)
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

    def newest(self, workers: Workers | None = None, device: torch.device | None = None) -> Saved | None:
        """The newest checkpoint that is whole, None without one.

        All `workers` go back to the same, of which the first knows. Each verifies the part that it will load; the
        first, what is one file, or of another number of workers.
        """
        workers, device = workers or Workers(), device or torch.device("cpu")
        for candidate in self.saved() if workers.is_first else repeat(None):
            found = Saved(*workers.firsts(candidate or (0, 0), device))
            damaged = found.step and not self._verify(found, workers)
            if not workers.sum(torch.tensor(int(damaged), device=device)):
                break
        else:
            found = Saved(*workers.firsts((0, 0), device))
            workers.sum(torch.tensor(0, device=device))
        if workers.is_first:
            self._forget_parts(found if found.step else None)
        return found if found.step else None

    def load(self, saved: Saved, rows_of: RowsOf = lambda _name, _tensor: None) -> Content:
        """The tensors, on the CPU, and the state of a checkpoint that `newest`, here or elsewhere, verified.

        Args:
            rows_of: How this worker holds a tensor; see `resplit`.

        Raises:
            EnvironmentFault: It is of another number of workers, and cannot be split anew.
        """
        verified, self._verified = self._verified, None
        if verified and verified[0] == saved:
            return verified[1]
        if saved.parts == self.parts.world_size:
            found = read_checkpoint(saved.path(self.directory, self.parts.rank), verify=False)
            assert found is not None, f"the checkpoint of step {saved.step} was whole a moment ago"
            return found
        return resplit(saved.paths(self.directory), rows_of)

    def _verify(self, saved: Saved, workers: Workers) -> bool:
        """Whether what this worker verifies is whole; what it will load is kept."""
        if saved.parts == self.parts.world_size:
            if self.parts.world_size == 1 and not workers.is_first:
                return True
            found = read_checkpoint(saved.path(self.directory, self.parts.rank))
            self._verified = (saved, found) if found else None
            return found is not None
        return not workers.is_first or all(map(read_checkpoint, saved.paths(self.directory)))

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """A copy on the CPU, where the last one of this name was; a GPU's has begun."""
        room = self._room.get(name)
        if room is None or (room.shape, room.dtype) != (tensor.shape, tensor.dtype):
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._room[name] = room
        return room.copy_(tensor, non_blocking=True)

    def _write(self, step: int, tensors: dict[str, Tensor], state: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = Saved(step, self.parts.world_size).path(self.directory, self.parts.rank)
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, {"state": state, "sha256": digest(tensors, state)})
        if self.parts.world_size == 1:
            self._forget(step)

    def _forget(self, step: int) -> None:
        """Remove what is older than the newest to be kept, or newer than this step: damaged, or another history's.

        Of parts, the first worker does, for all; every one has written its newest by then.
        """
        if not self.parts.is_first:
            return
        saved = self.saved()
        history = [each for each in saved if each.step <= step]
        for each in set(saved) - set(history[: self.settings.keep_checkpoints]):
            for path in each.paths(self.directory):
                path.unlink(missing_ok=True)

    def _forget_parts(self, kept: Saved | None) -> None:
        """Remove parts without the others, or newer than what is gone back to: those of two histories make no whole."""
        history = {each for each in self.saved() if kept and each.step <= kept.step}
        wanted = {path for each in history for path in each.paths(self.directory)}
        for path in set(self.directory.glob("step-*-of-*.safetensors")) - wanted:
            path.unlink(missing_ok=True)


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
