"""The Ray executor: a pool of actors processes shards, a Ray task runs a single function.

A private cluster is started unless RAY_ADDRESS (which `ray job submit` sets) names one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from pipeline.errors import EnvironmentFault
from pipeline.execution.actor_pool import ActorPool
from pipeline.execution.cluster_watch import PATIENCE, PATIENCE_WITH_OTHERS, ClusterWatch
from pipeline.execution.placement import Placement, Resources
from pipeline.execution.progress import ProgressReporter, with_progress
from pipeline.execution.ray_answers import (
    last_line,
    run_and_carry_errors,
    wait_for_one,
    worker_died,
)
from pipeline.execution.ray_cluster import connect, driver_needs
from pipeline.execution.shard_progress import ShardProgress
from pipeline.execution.shard_worker import Outcome, ShardWorker
from pipeline.storage.tasks import ShardTask


class RayExecutor:
    """The methods of `InlineExecutor`, in other processes."""

    name = "ray"

    def __init__(self) -> None:
        address = os.environ.get("RAY_ADDRESS", "")
        self._connected = not ray.is_initialized()
        patience = PATIENCE_WITH_OTHERS
        if self._connected:
            connect(address)
            if not address:
                patience = PATIENCE
        self.watch = ClusterWatch(driver_needs(address), patience)

    def resources(self) -> Resources:
        self.watch.settle()
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        sizes = tuple((int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in alive)
        return Resources(sizes)

    def map(
        self,
        worker: Callable[..., ShardWorker],
        arguments: dict[str, Any],
        tasks: deque[ShardTask],
        placement: Placement,
        seconds_per_task: float,
        progress: ShardProgress | None = None,
    ) -> Iterator[Outcome]:
        work = worker, with_progress(arguments, progress)
        return ActorPool(work, tasks, placement, seconds_per_task, progress, self.watch).outcomes()

    def call(
        self,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        placement: Placement,
        progress: ProgressReporter | None = None,
    ) -> Any:
        # max_calls=1: the process ends with the call and releases the memory and GPU that an engine
        # holds.
        options = {
            "num_cpus": placement.cpus,
            "num_gpus": placement.gpus,
            "max_calls": 1,
            "max_retries": 1,
        }
        remote = ray.remote(**options)(run_and_carry_errors)
        reference = remote.remote(function, with_progress(arguments, progress))
        try:
            wait_for_one([reference], self.watch, progress)
            result, error = ray.get(reference)
        except RayTaskError as failure:
            fix = (
                "MEDUSA_DISTILL_TRACEBACK=1 shows all of it; --executor inline does it in this"
                " process."
            )
            raise EnvironmentFault(
                f"{function.__name__} failed: {last_line(failure)}.", "Ray", fix
            ) from failure
        except RayError as death:
            self.watch.settle()
            raise worker_died(death) from death
        if error:
            raise error
        return result

    def close(self) -> None:
        if self._connected:
            ray.shutdown()
