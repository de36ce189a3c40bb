"""Ray does the distributing: Ray Data maps actors over shard descriptors, a Ray task runs a single function.

Tensors never travel through the object store: an actor reads and writes its own shards and returns a receipt. A
private cluster is started unless RAY_ADDRESS (which `ray job submit` sets) names one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from pipeline.errors import EnvironmentFault, MedusaDistillError
from pipeline.execution.executor import LazyWorker, Outcome, ShardWorker
from pipeline.execution.placement import Placement, Resources
from pipeline.storage.stage_directory import ShardTask

# Idle threads that spin take the cores from their neighbours: vLLM beside a busy core made half its tokens.
WORKER_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "TORCH_CPP_LOG_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
OBJECT_STORE_BYTES = 256 * 1024**2  # descriptors and receipts only


class ShardActor:
    """What Ray Data runs: one batch is one shard descriptor, one outcome."""

    def __init__(self, worker: Callable[..., ShardWorker], arguments: dict[str, Any]):
        self._lazy = LazyWorker(worker, arguments)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        outcomes = [self._lazy.run(ShardTask(**json.loads(text))) for text in batch["task"]]
        return {"outcome": [pickle.dumps(outcome) for outcome in outcomes]}


class RayExecutor:
    """Workers are Ray actors and tasks.

    `max_failures` is how often a shard may kill its worker: what takes more memory than there is, Ray would retry for
    ever.
    """

    name = "ray"

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # its C++ side warns of what is meant
        try:
            import ray
            import ray.data
        except ImportError as error:
            raise EnvironmentFault(
                f"Ray cannot be imported: {error}.", fix="Install it, or run with --executor inline."
            ) from None
        self._ray = ray
        self._started = not ray.is_initialized()
        if self._started:
            self._start()
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.enable_operator_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors are raised: they need no traceback too

    def _start(self) -> None:
        quiet: dict[str, Any] = {
            "logging_level": logging.ERROR,
            "log_to_driver": False,
            "runtime_env": {"env_vars": WORKER_ENVIRONMENT},
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
        tasks: Sequence[ShardTask],
        placement: Placement,
    ) -> Iterator[Outcome]:
        data = self._ray.data
        descriptors = data.from_items(
            [{"task": json.dumps(asdict(task))} for task in tasks], override_num_blocks=len(tasks)
        )
        with (
            warnings.catch_warnings()
        ):  # of max_task_retries, which Ray takes nowhere else; pyproject.toml keeps below 2.64
            warnings.filterwarnings("ignore", message=".*ray_remote_args")
            outcomes = descriptors.map_batches(
                ShardActor,
                fn_constructor_kwargs={"worker": worker, "arguments": arguments},
                batch_size=1,
                compute=data.ActorPoolStrategy(size=min(placement.workers, len(tasks))),
                num_cpus=placement.cpus,
                num_gpus=placement.gpus,
                max_task_retries=self._max_failures - 1,
            )
        with self._faults():
            for row in outcomes.iter_rows():
                yield pickle.loads(row["outcome"])

    def call(self, function: Callable[..., Any], arguments: dict[str, Any], placement: Placement) -> Any:
        # max_calls=1: the process ends with the call, and with it what an engine holds of memory and GPU.
        remote = self._ray.remote(num_cpus=placement.cpus, num_gpus=placement.gpus, max_calls=1, max_retries=1)(
            run_and_carry_errors
        )
        with self._faults():
            result, error = self._ray.get(remote.remote(function, arguments))
        if error:
            raise error
        return result

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Say in one line how a worker died, or what it raised that was meant for nobody."""
        try:
            yield
        except self._ray.exceptions.RayError as error:
            said = str(error).strip().splitlines() or [type(error).__name__]
            fix = "If memory ran out, use smaller batches or more GPUs. What was committed is kept; run it again."
            raise EnvironmentFault(f"A worker died: {said[-1].rstrip('.')}.", "Ray", fix) from error

    def close(self) -> None:
        if self._started:
            self._ray.shutdown()


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Keep how this process stops: Ray's handler of SIGTERM would end it without a word."""
    kept = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    stopped = False
    try:
        yield
    except SystemExit:
        stopped = True
    finally:
        if threading.current_thread() is threading.main_thread():  # elsewhere Ray sets none, and nor may we
            for signum, handler in kept.items():
                signal.signal(signum, handler)
    if stopped:
        signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """Drop what C++ code writes to the terminal: Ray's greets every start with the log level that it was given."""
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
    """Errors meant for the user come back as they are, not wrapped in Ray's own."""
    try:
        return function(**arguments), None
    except MedusaDistillError as error:
        return None, error
