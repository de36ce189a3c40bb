"""The workers of one `map` as Ray actors, which process shards one by one.

Tensors never travel through the object store: an actor is given a shard's path, reads and writes
the shard itself, and returns a receipt. The pool is our own and not Ray Data's because of failures:
it knows which shard ended its worker's process, the other workers continue meanwhile, and a failed
shard goes to a worker that has its model loaded.
"""

from __future__ import annotations

import contextlib
import faulthandler
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import ray
from ray.exceptions import RayError

from pipeline.errors import MedusaDistillError
from pipeline.execution.cluster_watch import ClusterWatch
from pipeline.execution.placement import Placement
from pipeline.execution.ray_answers import last_line, wait_for_one, worker_died
from pipeline.execution.shard_progress import ShardProgress
from pipeline.execution.shard_worker import LazyWorker, Outcome, ShardWorker
from pipeline.storage.atomic import disk_errors
from pipeline.storage.tasks import ShardTask

MAX_FAILED_STARTS = 3  # consecutive workers that end before their first shard
SECONDS_TO_CLOSE = 30.0
LEAST_SECONDS = 900.0  # for a few rows of a shard, including loading the model

Work: TypeAlias = (
    "tuple[Callable[..., ShardWorker], dict[str, Any]]"  # a worker's class and its arguments
)


class ShardActor:
    """A worker in its own process."""

    def __init__(self, work: Work, seconds_per_task: float):
        self._lazy = LazyWorker(*work)
        self._seconds_per_task = seconds_per_task

    def ready(self) -> None:
        """Returns once the process has started; only then is it given a shard."""

    def run(self, task: ShardTask, upcoming: ShardTask | None) -> Outcome:
        least = min(self._seconds_per_task, LEAST_SECONDS)
        seconds = max(task.share * self._seconds_per_task, least)
        try:
            with disk_errors(task.attempt_log), time_limit(task, seconds):
                return self._lazy.run(task, upcoming)
        except MedusaDistillError as error:
            return Outcome(task, error=error)

    def close(self) -> None:
        self._lazy.close()


@contextlib.contextmanager
def time_limit(task: ShardTask, seconds: float) -> Iterator[None]:
    """End this process when the shard takes longer, and write every thread's stack to its log.

    The timer runs in a C thread: it also ends a process that never releases the GIL.
    """
    path = task.attempt_log
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as log:
        faulthandler.dump_traceback_later(seconds, exit=True, file=log)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
    path.unlink(missing_ok=True)


@dataclass
class Slot:
    """An actor, its current task, and the one that it was told to expect after that."""

    actor: Any
    task: ShardTask | None = None  # None while its process starts
    upcoming: ShardTask | None = None


class ActorPool:
    """At most `placement.workers` actors, and no more than there are tasks for; the arguments are
    those of `map`.
    """

    def __init__(
        self,
        work: Work,
        tasks: deque[ShardTask],
        placement: Placement,
        seconds_per_task: float,
        progress: ShardProgress | None,
        watch: ClusterWatch,
    ):
        self._tasks, self._num_workers, self._seconds_per_task = (
            tasks,
            placement.workers,
            seconds_per_task,
        )
        self._actor_class = ray.remote(num_cpus=placement.cpus, num_gpus=placement.gpus)(ShardActor)
        self._work, self._progress, self._watch = ray.put(work), progress, watch
        self._running: dict[Any, Slot] = {}  # by the reference of what it was asked for
        self._idle: list[Slot] = []
        self._failed_starts = 0

    def outcomes(self) -> Iterator[Outcome]:
        """The outcome of each task as it finishes; the tasks may grow meanwhile."""
        try:
            self._assign()
            while self._unfinished():
                answer = wait_for_one(self._running, self._watch, self._progress)
                outcome = self._outcome(answer, self._running.pop(answer))
                self._assign()  # before the caller handles the outcome: no worker waits for that
                if outcome:
                    yield outcome
                    self._assign()
        finally:
            self._close()

    def _unfinished(self) -> bool:
        """Whether there are tasks left; a worker that starts is not waited for without one: it may
        never have room.
        """
        return bool(self._tasks) or any(slot.task for slot in self._running.values())

    def _assign(self) -> None:
        """Give tasks to idle workers; start as many more as there are tasks for."""
        tasks, still_idle = self._tasks, []
        for slot in self._idle:
            if slot.upcoming is None and not tasks:
                still_idle.append(slot)
                continue
            slot.task = slot.upcoming or tasks.popleft()
            slot.upcoming = None
            if len(tasks) >= self._num_workers:
                slot.upcoming = tasks.popleft()
            self._running[slot.actor.run.remote(slot.task, slot.upcoming)] = slot
        self._idle = still_idle
        num_starting = sum(slot.task is None for slot in self._running.values())
        num_free = self._num_workers - len(self._running)
        for _ in range(min(len(tasks) - num_starting, num_free)):
            slot = Slot(self._actor_class.remote(self._work, self._seconds_per_task))
            self._running[slot.actor.ready.remote()] = slot

    def _outcome(self, answer: Any, slot: Slot) -> Outcome | None:
        """The outcome of a slot's task; None for a worker that has started, or that died before its
        first task.
        """
        try:
            outcome: Outcome | None = ray.get(answer)
        except RayError as error:
            self._watch.settle()
            ray.kill(slot.actor)  # it may still be alive and hold its cores
            if slot.upcoming:
                self._tasks.appendleft(slot.upcoming)
            if slot.task is not None:
                return Outcome(slot.task, death=hang_report(slot.task) or last_line(error))
            self._failed_starts += 1
            if self._failed_starts == MAX_FAILED_STARTS:
                raise worker_died(error) from error
            return None
        self._idle.append(slot)
        self._failed_starts = 0
        return outcome

    def _close(self) -> None:
        """End the workers; idle ones first release what they hold, such as an engine's memory."""
        if self._watch.is_dead:  # nobody is left to be told
            return
        with contextlib.suppress(RayError):
            ray.get([slot.actor.close.remote() for slot in self._idle], timeout=SECONDS_TO_CLOSE)
        for slot in [*self._idle, *self._running.values()]:
            ray.kill(slot.actor)


def hang_report(task: ShardTask) -> str:
    """The stacks that a worker wrote when it was ended because it hung; empty of any other
    death.
    """
    try:
        text = task.attempt_log.read_text(encoding="utf-8")
        task.attempt_log.unlink()
    except OSError:
        return ""
    return f"It hung and was ended. {text}" if text else ""
