"""The Ray executor: a pool of actors processes shards, a Ray task runs a single function.

A private cluster is started unless RAY_ADDRESS (which `ray job submit` sets) names one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipeline import OPENMP
from pipeline.errors import EnvironmentFault, MedusaDistillError
from pipeline.execution.agent_guard import AgentGuard
from pipeline.execution.cluster_watch import CLIENT, ClusterWatch, require_answer
from pipeline.execution.executor import Outcome, ShardWorker, with_progress
from pipeline.execution.placement import Placement, Resources
from pipeline.execution.progress import SECONDS_BETWEEN_REPORTS, ProgressReporter
from pipeline.execution.shard_progress import ShardProgress
from pipeline.storage.atomic import disk_errors
from pipeline.storage.tasks import ShardTask

SUBMITTED_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray in a submitted job's entry point
WORKER_ENVIRONMENT = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
OBJECT_STORE_BYTES = 256 * 1024**2  # tasks and receipts only
QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}


def worker_environment() -> dict[str, str]:
    """Variables of workers on a cluster that stands, without those that a submitted job sets: Ray refuses both."""
    job = json.loads(os.environ.get(SUBMITTED_JOB) or "{}").get("runtime_env") or {}
    ours = WORKER_ENVIRONMENT | {name: os.environ[name] for name in OPENMP if name in os.environ}
    return {name: value for name, value in ours.items() if name not in job.get("env_vars", {})}


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
        self._guard: AgentGuard | None = None
        if self._started:
            self._start()
        self.watch = self._watched()

    def _start(self) -> None:
        self._ray._private.worker.print_to_stdstream = say_nothing  # of dead workers, which events.jsonl has
        address = os.environ.get("RAY_ADDRESS")
        if address:
            require_answer(address, resolved(address))
        try:
            with without_stderr(), own_signals():
                if address:
                    self._ray.init(**QUIET, runtime_env={"env_vars": worker_environment()})
                else:
                    start_cluster(len(os.sched_getaffinity(0)))
                    self._guard = AgentGuard.of_own_cluster()
        except Exception as error:
            raise start_error(error, address) from None

    def _watched(self) -> ClusterWatch | None:
        """The cluster that this process is connected to; None behind Ray Client, which watches it itself."""
        node = self._ray._private.worker._global_node
        if node is None:
            return None
        return ClusterWatch(node.gcs_address, node.raylet_socket_name, own=self._guard is not None)

    def resources(self) -> Resources:
        if self.watch:
            self.watch.settle()
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return Resources(tuple((int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in alive))

    def map(
        self,
        worker: Callable[..., ShardWorker],
        arguments: dict[str, Any],
        tasks: deque[ShardTask],
        placement: Placement,
        seconds_per_task: float,
        progress: ShardProgress | None = None,
    ) -> Iterator[Outcome]:
        from pipeline.execution.actor_pool import ActorPool  # imports ray

        work = worker, with_progress(arguments, progress)
        return ActorPool(work, tasks, placement, seconds_per_task, progress, self.watch).outcomes()

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
        answer = remote.remote(function, with_progress(arguments, progress))
        try:
            while not self._ray.wait([answer], timeout=SECONDS_BETWEEN_REPORTS)[0]:
                if self.watch:
                    self.watch.check()
                if progress:
                    progress.poll()
            if progress:
                progress.poll()
            result, error = self._ray.get(answer)
        except self._ray.exceptions.RayTaskError as failure:
            fix = "MEDUSA_DISTILL_TRACEBACK=1 shows all of it; --executor inline does it in this process."
            raise EnvironmentFault(f"{function.__name__} failed: {last_line(failure)}.", "Ray", fix) from failure
        except self._ray.exceptions.RayError as death:
            if self.watch:
                self.watch.settle()
            raise worker_died(death) from death
        if error:
            raise error
        return result

    def close(self) -> None:
        if self._started:
            self._ray.shutdown()
        if self._guard:
            self._guard.close()


def start_cluster(num_cpus: int) -> Any:
    """A cluster of this process's own, whose workers inherit their variables; what `ray.init` returns.

    With a runtime environment instead, Ray would not use the workers that it starts with the cluster, and would import
    itself twice in every other one.
    """
    import ray

    with environment(WORKER_ENVIRONMENT):
        return ray.init(
            "local", num_cpus=num_cpus, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **QUIET
        )


def resolved(address: str) -> str | None:
    """The host and port of a cluster that RAY_ADDRESS names; None where it says `auto` and Ray finds none here."""
    from ray._private.services import find_bootstrap_address, find_gcs_addresses

    if address == "auto":
        return find_bootstrap_address(None) or next(iter(find_gcs_addresses()), None)
    plain = address.removeprefix(CLIENT).partition("?")[0]
    return plain if ":" in plain else f"{plain}:10001"  # Ray Client's port, where none is named


def start_error(error: Exception, address: str | None) -> EnvironmentFault:
    """Why Ray did not start, and what to do about it."""
    said = str(error).rstrip(".")
    if "AF_UNIX path length" in said:
        name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "TMPDIR")
        what = (
            "Ray did not start: the directory for temporary files, where its sockets lie, has too long a path for them."
        )
        fix = f"Set {name} to a path of at most 40 characters, such as /tmp, and run the same command again."
        return EnvironmentFault(what, f"{name}={os.environ.get(name, '')}", fix)
    fix = "Check RAY_ADDRESS and `ray status`, or run with --executor inline."
    return EnvironmentFault(f"Ray did not start: {said}.", address or "a local cluster", fix)


def say_nothing(*_: Any, **__: Any) -> None:
    """In the place of Ray's printing."""


def worker_died(error: Exception) -> EnvironmentFault:
    fix = "If memory ran out, use smaller batches or more GPUs. What was committed is kept; run it again."
    return EnvironmentFault(f"A worker died: {last_line(error)}.", "Ray", fix)


def last_line(error: Exception) -> str:
    """The last line of an error's text, after Ray's own frames."""
    said = str(error).strip().splitlines() or [repr(error)]
    return said[-1].strip().rstrip(".")


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables that processes which are started meanwhile inherit."""
    kept = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(kept)


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
        with disk_errors():
            result = function(**arguments)
    except MedusaDistillError as error:
        return None, error
    return result, None
