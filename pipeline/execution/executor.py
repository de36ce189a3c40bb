"""Where work runs. An executor maps a stage's worker over shards, or calls one function; nothing else.

A worker is a plain class: its constructor loads what is heavy, its call takes a `ShardTask`, commits the shard itself
and returns the receipt. It knows nothing of Ray.
"""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import ConfigError, MedusaDistillError
from pipeline.execution.placement import Placement, Resources
from pipeline.storage.durable import disk_errors
from pipeline.storage.shards import Receipt
from pipeline.storage.stage_directory import ShardTask


@dataclass(frozen=True)
class Outcome:
    """What became of one shard: a receipt, an error for the user, or a worker's traceback."""

    index: int
    receipt: Receipt | None = None
    error: MedusaDistillError | None = None
    traceback: str = ""


class ShardWorker(Protocol):
    """What a stage maps over its shards."""

    def __call__(self, task: ShardTask) -> Receipt: ...


class Executor(Protocol):
    """Ray, or the calling process."""

    name: str

    def resources(self) -> Resources:
        """What there is to place workers on."""
        ...

    def map(
        self,
        worker: Callable[..., ShardWorker],
        arguments: dict[str, Any],
        tasks: Sequence[ShardTask],
        placement: Placement,
    ) -> Iterator[Outcome]:
        """Run `worker(**arguments)` over tasks; outcomes come as they finish, in any order."""
        ...

    def call(self, function: Callable[..., Any], arguments: dict[str, Any], placement: Placement) -> Any:
        """Run one function on its own resources and return what it returns; its errors are raised here."""
        ...

    def close(self) -> None:
        """Give back what the executor started."""
        ...


class LazyWorker:
    """Builds the worker on its first task, and turns every failure into an `Outcome`.

    A failure inside a constructor would otherwise end a whole Ray data set with a stack of foreign frames.
    """

    def __init__(self, worker: Callable[..., ShardWorker], arguments: dict[str, Any]):
        self._make, self._arguments = worker, arguments
        self._worker: ShardWorker | None = None

    def run(self, task: ShardTask) -> Outcome:
        try:
            self._worker = self._worker or self._make(**self._arguments)
            with disk_errors(Path(task.shard)):
                return Outcome(task.index, receipt=self._worker(task))
        except MedusaDistillError as error:
            return Outcome(task.index, error=error)
        except Exception:
            return Outcome(task.index, traceback=traceback.format_exc())

    def close(self) -> None:
        """Let the worker give back what it holds: an engine's memory, which the next stage needs."""
        if close := getattr(self._worker, "close", None):
            close()
        self._worker = None


class InlineExecutor:
    """Everything in the calling process: for a debugger, a notebook, or a machine without Ray."""

    name = "inline"

    def resources(self) -> Resources:
        import torch

        return Resources(((len(os.sched_getaffinity(0)), torch.cuda.device_count()),))

    def map(
        self,
        worker: Callable[..., ShardWorker],
        arguments: dict[str, Any],
        tasks: Sequence[ShardTask],
        placement: Placement,
    ) -> Iterator[Outcome]:
        lazy = LazyWorker(worker, arguments)
        try:
            for task in tasks:
                yield lazy.run(task)
        finally:
            lazy.close()
            free_gpu_memory()

    def call(self, function: Callable[..., Any], arguments: dict[str, Any], placement: Placement) -> Any:
        try:
            return function(**arguments)
        finally:
            free_gpu_memory()

    def close(self) -> None:
        pass


def free_gpu_memory() -> None:
    """Give back what torch keeps of memory that nobody uses any more: other processes may need it."""
    import torch

    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def check_executor(name: str) -> None:
    """Raise ConfigError where no executor has that name."""
    if name not in ("ray", "inline"):
        raise ConfigError(f"There is no executor '{name}'.", "--executor", "It is ray or inline.")


def make_executor(name: str, max_failures: int) -> Executor:
    """The executor of that name, `ray` or `inline`.

    Args:
        max_failures: How often one shard may kill its worker; inline there is none to kill.

    Raises:
        ConfigError: There is none.
        EnvironmentFault: Ray cannot be started or reached.
    """
    check_executor(name)
    if name == "inline":
        return InlineExecutor()
    from pipeline.execution.ray_executor import RayExecutor

    return RayExecutor(max_failures)
