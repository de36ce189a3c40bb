"""Run shards in a pool of Ray actors, and single functions in Ray tasks.

Tensors never travel through the object store: an actor gets a shard's path, reads and writes the
shard itself, and returns a receipt. Ray Data is not used because of failures: this pool knows which
shard ended its worker's process, the other workers continue meanwhile, and a failed shard is
retried by a worker whose model is already loaded.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from pipeline.errors import EnvironmentFault, MedusaDistillError
from pipeline.execution.placement import Placement, Resources
from pipeline.execution.progress import ProgressReporter, ShardProgress, with_progress
from pipeline.execution.ray_cluster import (
    PATIENCE,
    PATIENCE_WITH_OTHERS,
    ClusterWatch,
    connect,
    driver_needs,
)
from pipeline.execution.shard_worker import LazyWorker, Outcome, ShardWorker
from pipeline.storage.atomic import disk_errors
from pipeline.storage.progress_file import SECONDS_BETWEEN_REPORTS
from pipeline.storage.shards import ShardTask
from pipeline.targets.spec import last_line

MAX_FAILED_STARTS = 3  # consecutive workers that end before their first shard
SECONDS_TO_CLOSE = 30.0
DEATH_FIX = (
    "If memory ran out, use smaller batches or more GPUs. What was committed is kept; run it again."
    " MEDUSA_DISTILL_TRACEBACK=1 shows where an error was raised."
)


class RayExecutor:
    """An executor that runs a stage's workers and single functions in Ray's worker processes.

    It connects to the cluster at RAY_ADDRESS, which `ray job submit` sets, or starts a private
    cluster. If Ray is initialized already, it uses that connection.

    Raises:
        EnvironmentFault: Ray cannot be started or reached.
    """

    name = "ray"

    def __init__(self) -> None:
        address = os.environ.get("RAY_ADDRESS", "")
        self._connected = not ray.is_initialized()
        patience = PATIENCE_WITH_OTHERS
        if self._connected:
            connect(address)
            if not address:
                patience = PATIENCE
        self.watch = ClusterWatch(driver_needs(), patience)

    def resources(self) -> Resources:
        """Return the CPU cores and GPUs of the Ray cluster's nodes."""
        self.watch.settle()
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        sizes = tuple((int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in alive)
        return Resources(sizes)

    def map(
        self,
        worker: Callable[..., ShardWorker],
        arguments: dict[str, object],
        tasks: deque[ShardTask],
        placement: Placement,
        progress: ShardProgress | None = None,
    ) -> Iterator[Outcome]:
        """Run shard tasks in a pool of Ray actors; yield their outcomes in the order of completion.

        Args:
            worker, arguments: Each actor makes its own `worker(**arguments)`.
            tasks: A queue, which is emptied. The caller may append tasks while it iterates, for
                example to retry one.
            placement: The number of actors, and the CPU cores and GPUs of each.
            progress: Passed to the workers' constructor as `progress`, and shown meanwhile, unless
                it is None.

        Raises:
            EnvironmentFault: The cluster has died, or its workers die before their first shard.
        """
        lazy = LazyWorker(worker, with_progress(arguments, progress))
        return ActorPool(lazy, tasks, placement, progress, self.watch).outcomes()

    def call(
        self,
        function: Callable[..., Any],
        arguments: dict[str, object],
        placement: Placement,
        progress: ProgressReporter | None = None,
    ) -> Any:
        """Call `function(**arguments)` in a Ray task and return its result.

        `progress` is passed to the function and shown meanwhile, unless it is None.

        Raises:
            MedusaDistillError: The function raised it.
            EnvironmentFault: The worker or the cluster has died, or the function raised another
                error.
        """
        # max_calls=1: the process ends with the call, which frees an engine's memory.
        remote = ray.remote(
            num_cpus=placement.cpus, num_gpus=placement.gpus, max_calls=1, max_retries=1
        )(run_and_carry_errors)
        try:
            reference = remote.remote(function, with_progress(arguments, progress))
            wait_for_one([reference], self.watch, progress)
            result, error = ray.get(reference)
        except RayError as death:
            self.watch.settle()
            raise worker_death_error(death) from death
        if error:
            raise error
        return result

    def close(self) -> None:
        """Disconnect from the Ray cluster, unless it was connected before this executor started."""
        if self._connected:
            ray.shutdown()


class ShardActor:
    """A Ray actor that runs a stage's worker on one shard after another."""

    def __init__(self, worker: LazyWorker):
        self._worker = worker

    def ready(self) -> None:
        """Return once the Ray actor's process has started; no shard is assigned before."""

    def run(self, task: ShardTask, upcoming: ShardTask | None) -> Outcome:
        """Run the stage's worker on a shard; return the receipt or the error as an outcome."""
        return self._worker.run(task, upcoming)

    def close(self) -> None:
        """Close the stage's worker in this Ray actor, so that its engine releases memory."""
        self._worker.close()


@dataclass
class Slot:
    """A Ray actor of the pool, with its current shard task and the next one, if that is chosen."""

    actor: Any
    task: ShardTask | None = None  # None while its process starts
    upcoming: ShardTask | None = None


@dataclass
class ActorPool:
    """A pool of at most `placement.workers` Ray actors that process shard tasks.

    No more actors are started than there are tasks. `watch` detects the cluster's death; for the
    other fields see `RayExecutor.map`.
    """

    worker: LazyWorker
    tasks: deque[ShardTask]
    placement: Placement
    progress: ShardProgress | None
    watch: ClusterWatch
    _running: dict[Any, Slot] = field(default_factory=dict)  # by the reference of the pending call
    _idle: list[Slot] = field(default_factory=list)
    _failed_starts: int = 0

    def outcomes(self) -> Iterator[Outcome]:
        """Yield the outcome of each shard task as it completes; finally end the Ray actors."""
        try:
            self._assign()
            while self._unfinished():
                answer = wait_for_one(self._running, self.watch, self.progress)
                outcome = self._outcome(answer, self._running.pop(answer))
                self._assign()  # first, so that no worker waits while the caller handles it
                if outcome:
                    yield outcome
                    self._assign()
        finally:
            self._close()

    def _unfinished(self) -> bool:
        """Return whether the pool of Ray actors has unfinished shard tasks.

        Actors that are still starting do not count: the cluster may never have room for them.
        """
        return bool(self.tasks) or any(slot.task for slot in self._running.values())

    def _assign(self) -> None:
        """Assign tasks to idle Ray actors, and start more actors if there are tasks left for them.

        While enough tasks are left for all workers, an actor also gets its next task, to prepare
        for it.
        """
        still_idle = []
        for slot in self._idle:
            slot.task = slot.upcoming
            slot.upcoming = None
            if slot.task is None and self.tasks:
                slot.task = self.tasks.popleft()
            if slot.task is None:
                still_idle.append(slot)
                continue
            if len(self.tasks) >= self.placement.workers:
                slot.upcoming = self.tasks.popleft()
            self._running[slot.actor.run.remote(slot.task, slot.upcoming)] = slot
        self._idle = still_idle
        num_starting = sum(slot.task is None for slot in self._running.values())
        num_free = self.placement.workers - len(self._running)
        for _ in range(min(len(self.tasks) - num_starting, num_free)):
            slot = Slot(self._start_actor())
            self._running[slot.actor.ready.remote()] = slot

    def _start_actor(self) -> Any:
        """Start a Ray actor of the pool, and return its handle."""
        remote = ray.remote(num_cpus=self.placement.cpus, num_gpus=self.placement.gpus)
        return remote(ShardActor).remote(self.worker)

    def _outcome(self, answer: Any, slot: Slot) -> Outcome | None:
        """Return the outcome of a Ray actor's task; None if the actor was only starting.

        An actor that died is killed, in case its process is still alive, and the next task that it
        had is put back into the queue.

        Raises:
            EnvironmentFault: The cluster has died, or several actors in a row died at their start.
        """
        try:
            outcome = ray.get(answer)
        except RayError as error:
            self.watch.settle()  # raises if the whole cluster died: then no shard is to blame
            ray.kill(slot.actor)  # it may still be alive and hold its cores
            if slot.upcoming:
                self.tasks.appendleft(slot.upcoming)
            if slot.task is not None:
                return Outcome(slot.task, death=last_line(error))
            self._failed_starts += 1
            if self._failed_starts == MAX_FAILED_STARTS:
                raise worker_death_error(error) from error
            return None
        self._idle.append(slot)
        self._failed_starts = 0
        return outcome

    def _close(self) -> None:
        """End the Ray actors; the workers of idle ones are closed first."""
        if self.watch.is_dead:
            return
        with contextlib.suppress(RayError):
            ray.get([slot.actor.close.remote() for slot in self._idle], timeout=SECONDS_TO_CLOSE)
        for slot in [*self._idle, *self._running.values()]:
            ray.kill(slot.actor)


def wait_for_one(
    references: Collection[Any],
    watch: ClusterWatch,
    progress: ProgressReporter | ShardProgress | None,
) -> Any:
    """Return the first finished Ray reference; meanwhile show progress and watch the cluster.

    Raises:
        EnvironmentFault: The cluster has died.
    """
    while True:
        ready, _ = ray.wait(list(references), timeout=SECONDS_BETWEEN_REPORTS)
        watch.check()
        if progress:
            progress.poll()
        if ready:
            return ready[0]


def run_and_carry_errors(
    function: Callable[..., Any], arguments: dict[str, object]
) -> tuple[Any, MedusaDistillError | None]:
    """Call a function in a Ray task; return `(result, None)`, or `(None, error)` if it fails.

    A MedusaDistillError is returned and not raised, because Ray would wrap it in an error of its
    own. Other errors are raised.
    """
    try:
        with disk_errors():
            result = function(**arguments)
    except MedusaDistillError as error:
        return None, error
    return result, None


def worker_death_error(error: Exception) -> EnvironmentFault:
    """Return the EnvironmentFault for the Ray error of a worker that died."""
    return EnvironmentFault(f"A worker died: {last_line(error)}.", "Ray", DEATH_FIX)
