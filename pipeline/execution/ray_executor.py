"""The Ray executor: actors process shards one by one, a Ray task runs a single function.

Tensors never travel through the object store: an actor is given a shard's path, reads and writes the shard itself, and
returns a receipt. The actor pool is our own and not Ray Data's because of failures: it knows which shard ended its
worker's process, the other workers continue meanwhile, and a failed shard goes to a worker that has its model loaded.
A private cluster is started unless RAY_ADDRESS (which `ray job submit` sets) names one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline import OPENMP
from pipeline.errors import EnvironmentFault, MedusaDistillError
from pipeline.execution.executor import LazyWorker, Outcome, ShardWorker
from pipeline.execution.placement import Placement, Resources
from pipeline.execution.progress import SECONDS_BETWEEN_REPORTS, ProgressReporter
from pipeline.storage.atomic import disk_errors
from pipeline.storage.tasks import ShardTask

SUBMITTED_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray in a submitted job's entry point
WORKER_ENVIRONMENT = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
OBJECT_STORE_BYTES = 256 * 1024**2  # tasks and receipts only
MAX_FAILED_STARTS = 3  # consecutive workers that end before their first shard
SECONDS_TO_CLOSE = 30.0
LEAST_SECONDS = 900.0  # for a few rows of a shard, including loading the model


def worker_environment() -> dict[str, str]:
    """Environment variables of the workers, without those that a submitted job sets itself: Ray refuses both."""
    job = json.loads(os.environ.get(SUBMITTED_JOB) or "{}").get("runtime_env") or {}
    ours = WORKER_ENVIRONMENT | {name: os.environ[name] for name in OPENMP if name in os.environ}
    return {name: value for name, value in ours.items() if name not in job.get("env_vars", {})}


class ShardActor:
    """A worker in its own process."""

    def __init__(self, work: tuple[Callable[..., ShardWorker], dict[str, Any]], seconds_per_task: float):
        self._lazy = LazyWorker(*work)
        self._seconds_per_task = seconds_per_task

    def ready(self) -> None:
        """Returns once the process has started; only then is it given a shard."""

    def run(self, task: ShardTask, upcoming: ShardTask | None) -> Outcome:
        seconds = max(task.share * self._seconds_per_task, min(self._seconds_per_task, LEAST_SECONDS))
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
    """An actor, and the task that it was told to expect after its current one."""

    actor: Any
    upcoming: ShardTask | None = None


class RayExecutor:
    name = "ray"

    def __init__(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # its C++ side warns of intended settings
        try:
            import ray
        except ImportError as error:
            raise EnvironmentFault(
                f"Ray cannot be imported: {error}.", fix="Install it, or run with --executor inline."
            ) from None
        self._ray = ray
        self._started = not ray.is_initialized()
        if self._started:
            self._start()

    def _start(self) -> None:
        quiet: dict[str, Any] = {
            "logging_level": logging.ERROR,
            "log_to_driver": False,
            "runtime_env": {"env_vars": worker_environment()},
        }
        local = {"num_cpus": len(os.sched_getaffinity(0)), "object_store_memory": OBJECT_STORE_BYTES}
        try:
            with without_stderr(), own_signals():
                if os.environ.get("RAY_ADDRESS"):
                    self._ray.init(**quiet)
                else:
                    self._ray.init("local", include_dashboard=False, **local, **quiet)
        except Exception as error:
            raise EnvironmentFault(
                f"Ray did not start: {error}.",
                os.environ.get("RAY_ADDRESS", "a local cluster"),
                "Check RAY_ADDRESS and `ray status`, or run with --executor inline.",
            ) from None

    def resources(self) -> Resources:
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return Resources(tuple((int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in alive))

    def map(
        self,
        worker: Callable[..., ShardWorker],
        arguments: dict[str, Any],
        tasks: deque[ShardTask],
        placement: Placement,
        seconds_per_task: float,
    ) -> Iterator[Outcome]:
        actor_class = self._ray.remote(num_cpus=placement.cpus, num_gpus=placement.gpus)(ShardActor)
        work = self._ray.put((worker, arguments))
        running: dict[Any, tuple[Slot, ShardTask | None]] = {}  # by Ray's object reference; without a task: starting
        idle: list[Slot] = []
        failed_starts = 0

        def assign() -> None:
            """Give tasks to idle workers; start as many more as there are tasks for."""
            for slot in [slot for slot in idle if slot.upcoming or tasks]:
                task = slot.upcoming or (tasks.popleft() if tasks else None)
                if task is None:
                    break
                idle.remove(slot)
                slot.upcoming = tasks.popleft() if len(tasks) >= placement.workers else None
                running[slot.actor.run.remote(task, slot.upcoming)] = (slot, task)
            starting = sum(task is None for _, task in running.values())
            while starting < len(tasks) and len(running) < placement.workers:
                slot = Slot(actor_class.remote(work, seconds_per_task))
                running[slot.actor.ready.remote()] = (slot, None)
                starting += 1

        try:
            assign()
            while running:
                (answer, *_), _ = self._ray.wait(list(running))
                slot, task = running.pop(answer)
                outcome, death = None, ""
                try:
                    outcome = self._ray.get(answer)
                    idle.append(slot)
                    failed_starts = 0
                except self._ray.exceptions.RayError as error:
                    death = last_line(error)
                    self._ray.kill(slot.actor)  # it may still be alive and hold its cores
                    if slot.upcoming:
                        tasks.appendleft(slot.upcoming)
                    failed_starts += task is None
                    if failed_starts == MAX_FAILED_STARTS:
                        raise self._died(error) from error
                assign()  # before the caller handles the outcome: no worker waits for that
                if task is not None:
                    yield outcome or Outcome(task, death=hang_report(task) or death)
                    assign()
        finally:
            with contextlib.suppress(self._ray.exceptions.RayError):  # idle ones release an engine's memory
                self._ray.get([slot.actor.close.remote() for slot in idle], timeout=SECONDS_TO_CLOSE)
            for slot in (*idle, *(slot for slot, _ in running.values())):
                self._ray.kill(slot.actor)

    def call(
        self,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        placement: Placement,
        progress: ProgressReporter | None = None,
    ) -> Any:
        # max_calls=1: the process ends with the call and releases the memory and GPU that an engine holds.
        remote = self._ray.remote(num_cpus=placement.cpus, num_gpus=placement.gpus, max_calls=1, max_retries=1)(
            run_and_carry_errors
        )
        answer = remote.remote(function, arguments | ({"progress": progress} if progress else {}))
        try:
            over = progress is None
            while progress and not over:
                over = bool(self._ray.wait([answer], timeout=SECONDS_BETWEEN_REPORTS)[0])
                progress.poll()
            result, error = self._ray.get(answer)
        except self._ray.exceptions.RayTaskError as failure:
            fix = "MEDUSA_DISTILL_TRACEBACK=1 shows all of it; --executor inline does it in this process."
            raise EnvironmentFault(f"{function.__name__} failed: {last_line(failure)}.", "Ray", fix) from failure
        except self._ray.exceptions.RayError as death:
            raise self._died(death) from death
        if error:
            raise error
        return result

    def _died(self, error: Exception) -> EnvironmentFault:
        fix = "If memory ran out, use smaller batches or more GPUs. What was committed is kept; run it again."
        return EnvironmentFault(f"A worker died: {last_line(error)}.", "Ray", fix)

    def close(self) -> None:
        if self._started:
            self._ray.shutdown()


def last_line(error: Exception) -> str:
    """The last line of an error's text, after Ray's own frames."""
    said = str(error).strip().splitlines() or [repr(error)]
    return said[-1].strip().rstrip(".")


def hang_report(task: ShardTask) -> str:
    """The stacks that a worker wrote when it was ended because it hung; empty of any other death."""
    try:
        text = task.attempt_log.read_text(encoding="utf-8")
        task.attempt_log.unlink()
    except OSError:
        return ""
    return f"It hung and was ended. {text}" if text else ""


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Keep this process's signal handlers: Ray's handler of SIGTERM would end it without a message."""
    kept = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    stopped = False
    try:
        yield
    except SystemExit:
        stopped = True
    finally:
        if threading.current_thread() is threading.main_thread():  # handlers can be set nowhere else
            for signum, handler in kept.items():
                signal.signal(signum, handler)
    if stopped:
        signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """Drop what C++ code writes to the terminal: Ray prints its log level at every start."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def run_and_carry_errors(
    function: Callable[..., Any], arguments: dict[str, Any]
) -> tuple[Any, MedusaDistillError | None]:
    """Return (result, error): errors meant for the user cross process borders as values, not wrapped in Ray's own."""
    try:
        return function(**arguments), None
    except MedusaDistillError as error:
        return None, error
