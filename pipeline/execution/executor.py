"""Where work runs: an executor maps a stage's worker over shards, or calls one function.

A worker is a plain class: its constructor loads the model, its call takes a `ShardTask`, commits the shard itself and
returns the receipt. It does not depend on Ray.
"""

from __future__ import annotations

import gc
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pipeline.errors import ConfigError, MedusaDistillError
from pipeline.execution.placement import Placement, Resources
from pipeline.execution.progress import ProgressReporter
from pipeline.execution.shard_progress import ShardProgress
from pipeline.storage.atomic import disk_errors
from pipeline.storage.receipts import Receipt
from pipeline.storage.tasks import ShardTask

if TYPE_CHECKING:
    from pipeline.execution.ray_executor import RayExecutor


@dataclass(frozen=True)
class Outcome:
    """The result of one shard: a receipt, an error for the user, a worker's traceback, or how its process ended."""

    task: ShardTask
    receipt: Receipt | None = None
    error: MedusaDistillError | None = None
    traceback: str = ""
    death: str = ""


class ShardWorker(Protocol):
    """What a stage maps over its shards.

    If it has `expect(task | None)`, that is called before each shard with the one that follows.
    """

    def __call__(self, task: ShardTask) -> Receipt: ...


class LazyWorker:
    """Builds the worker on its first task, and turns every failure, its constructor's too, into an `Outcome`."""

    def __init__(self, worker: Callable[..., ShardWorker], arguments: dict[str, Any]):
        self._make, self._arguments = worker, arguments
        self._worker: ShardWorker | None = None

    def run(self, task: ShardTask, upcoming: ShardTask | None = None) -> Outcome:
        try:
            with disk_errors(Path(task.shard)):
                self._worker = self._worker or self._make(**self._arguments)
                if expect := getattr(self._worker, "expect", None):
                    expect(upcoming if task.rows is None else None)  # a trial of single rows runs alone
                receipt = self._worker(task)
            if progress := self._arguments.get("progress"):
                progress.end(task)
            return Outcome(task, receipt=receipt)
        except MedusaDistillError as error:
            return Outcome(task, error=error)
        except Exception:
            told = traceback.format_exc()
            self.close()  # its state is unknown: the next shard gets a new one
            return Outcome(task, traceback=told)

    def close(self) -> None:
        """Let the worker release what it holds: an engine's memory, which the next stage needs."""
        if close := getattr(self._worker, "close", None):
            close()
        self._worker = None


class InlineExecutor:
    """Everything in the calling process: for a debugger, a notebook, or a machine without Ray.

    A shard that kills its worker kills the run, and one that hangs blocks it. `RayExecutor` has the same methods.
    """

    name = "inline"

    def resources(self) -> Resources:
        """What workers can be placed on."""
        import torch

        return Resources(((len(os.sched_getaffinity(0)), torch.cuda.device_count()),))

    def map(
        self,
        worker: Callable[..., ShardWorker],
        arguments: dict[str, Any],
        tasks: deque[ShardTask],
        placement: Placement,
        seconds_per_task: float,
        progress: ShardProgress | None = None,
    ) -> Iterator[Outcome]:
        """Run `worker(**arguments)` over tasks; outcomes come as they finish, in any order.

        Args:
            tasks: Consumed. The caller may append more while it iterates, such as one that failed.
            seconds_per_task: A worker that takes longer is ended and counts as dead (inline: no limit).
            progress: Passed to the worker under that name, and shown while it works.
        """
        lazy = LazyWorker(worker, with_progress(arguments, progress))
        try:
            while tasks:
                task = tasks.popleft()
                yield lazy.run(task, tasks[0] if tasks else None)
        finally:
            lazy.close()
            free_gpu_memory()

    def call(
        self,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        placement: Placement,
        progress: ProgressReporter | None = None,
    ) -> Any:
        """Run one function on its own resources and return what it returns; its errors are raised here.

        A `progress` is passed to the function under that name, and shown while it runs.
        """
        try:
            return function(**with_progress(arguments, progress))
        finally:
            free_gpu_memory()

    def close(self) -> None:
        """Stop what the executor started."""


def with_progress(arguments: dict[str, Any], progress: ProgressReporter | ShardProgress | None) -> dict[str, Any]:
    """The arguments of a function that may report its progress."""
    return arguments | {"progress": progress} if progress else arguments


Executor: TypeAlias = "InlineExecutor | RayExecutor"


def free_gpu_memory() -> None:
    """Release the GPU memory that torch caches but does not use, for other processes."""
    import torch

    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def check_executor(name: str) -> None:
    if name not in ("ray", "inline"):
        raise ConfigError(f"There is no executor '{name}'.", "--executor", "It is ray or inline.")


def make_executor(name: str) -> Executor:
    """The executor of that name, `ray` or `inline`.

    Raises:
        ConfigError: There is none.
        EnvironmentFault: Ray cannot be started or reached.
    """
    check_executor(name)
    if name == "inline":
        return InlineExecutor()
    from pipeline.execution.ray_executor import RayExecutor

    return RayExecutor()
