"""Run a stage's workers over its shards, or one function, in this process or through Ray."""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.errors import ConfigError
from pipeline.execution.placement import Placement, Resources
from pipeline.execution.progress import ProgressReporter, ShardProgress, with_progress
from pipeline.execution.shard_worker import LazyWorker, Outcome, ShardWorker
from pipeline.storage.shards import ShardTask

if TYPE_CHECKING:
    from pipeline.execution.ray_executor import RayExecutor

Executor: TypeAlias = "InlineExecutor | RayExecutor"


class InlineExecutor:
    """An executor that runs everything in this process, for a debugger or a notebook.

    A shard that crashes the process ends the run, and one that hangs blocks it. `RayExecutor` has
    the same methods.
    """

    name = "inline"

    def resources(self) -> Resources:
        """Return the CPU cores and GPUs that this process can use, as one node."""
        import torch

        return Resources(((len(os.sched_getaffinity(0)), torch.cuda.device_count()),))

    def map(
        self,
        worker: Callable[..., ShardWorker],
        arguments: dict[str, object],
        tasks: deque[ShardTask],
        placement: Placement,
        progress: ShardProgress | None = None,
    ) -> Iterator[Outcome]:
        """Run shard tasks on one worker, `worker(**arguments)`, and yield their outcomes in order.

        Args:
            tasks: A queue, which is emptied. The caller may append tasks while it iterates, for
                example to retry one.
            placement: Ignored.
            progress: Passed to the worker's constructor as `progress`, unless it is None.
        """
        lazy = LazyWorker(worker, with_progress(arguments, progress))
        try:
            while tasks:
                task = tasks.popleft()
                yield lazy.run(task, next(iter(tasks), None))
        finally:
            lazy.close()
            free_gpu_memory()

    def call(
        self,
        function: Callable[..., Any],
        arguments: dict[str, object],
        placement: Placement,
        progress: ProgressReporter | None = None,
    ) -> Any:
        """Call `function(**arguments)` in this process and return its result.

        `placement` is ignored. `progress` is passed to the function, unless it is None.
        """
        try:
            return function(**with_progress(arguments, progress))
        finally:
            free_gpu_memory()

    def close(self) -> None:
        """Do nothing, since this executor starts no processes."""


def free_gpu_memory() -> None:
    """Release the GPU memory that torch caches but no tensor uses."""
    import torch

    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def check_executor(name: str) -> None:
    """Raise ConfigError unless `name` is `ray` or `inline`."""
    if name not in ("ray", "inline"):
        raise ConfigError(f"There is no executor '{name}'.", "--executor", "Use ray or inline.")


def make_executor(name: str) -> Executor:
    """Create the executor `inline` or `ray`.

    Raises:
        EnvironmentFault: Ray cannot be started or reached.
    """
    if name == "inline":
        return InlineExecutor()
    from pipeline.execution.ray_executor import RayExecutor  # imports Ray

    return RayExecutor()
