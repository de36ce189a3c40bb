"""Training on a Ray cluster: Ray Train starts the workers, forms their process group, and restarts
them when one dies.

Resume is the trainer's: the workers report no checkpoint to Ray, so a restarted group (or a new
driver) reads on from the newest whole checkpoint in the stage directory. Ray's own bookkeeping
therefore has a name of its own in every call and is removed afterwards. Each worker computes on one
device, however many GPUs it reserves.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback, get_context
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.config import LoggingConfig

from pipeline.errors import CheckFailed, ConfigError, EnvironmentFault, MedusaDistillError
from pipeline.execution.placement import Placement
from pipeline.execution.progress import ProgressReporter
from pipeline.execution.ray_executor import last_line, run_and_carry_errors
from pipeline.training.phases import count_steps, finished, train
from pipeline.training.task import TrainSpec, Workers

MAX_START_FAILURES = 10  # a minute each: a cluster that scales up needs some
HEALTH_CHECK_SECONDS = "0.5"

WorkerResult = tuple[dict[str, Any], MedusaDistillError | None]
"""The first worker's summary, or what the user is to be told."""


def train_on_ray(
    spec: TrainSpec,
    placement: Placement,
    max_failures: int,
    on_death: Callable[..., None] | None = None,
    progress: ProgressReporter | None = None,
    worker: Callable[[dict[str, Any]], WorkerResult] | None = None,
) -> dict[str, Any]:
    """`train` on the placement's workers; returns the first worker's summary.

    Call it in a Ray task, through the executor: Ray Train's `fit` blocks and takes SIGINT for
    itself, and in a thread of the driver it would not survive that Ray is shut down, which is how a
    driver stops.

    Args:
        max_failures: A worker's death restarts the group from the newest checkpoint, in all less
            than so many times.
        on_death: Called with `error="..."` for each death, in the process of Ray Train's
            controller; picklable.
        progress: What the first worker reports to.
        worker: What every worker runs, where it is not `run_worker`.

    A finished run only returns its summary: Ray Train would start workers for nothing.

    Raises:
        MedusaDistillError: What a worker raised, as it is.
        EnvironmentFault: Workers died too often.
    """
    if summary := finished(spec):
        return summary
    count_steps(spec)  # bad data is refused here, before anything is started
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", HEALTH_CHECK_SECONDS)
    spec = _absolute(spec)
    bookkeeping = spec.path / "ray"
    bookkeeping.mkdir(exist_ok=True)
    run = _run_config(str(bookkeeping), max_failures, on_death)
    settings = {"spec": spec, "cpus": placement.cpus, "progress": progress}
    try:
        summary, error = _trainer(worker or run_worker, settings, placement, run).fit().return_value
    except Exception as failure:
        raise _readable(failure, spec) from failure
    finally:
        shutil.rmtree(bookkeeping, ignore_errors=True)
    if error:
        raise error
    return summary


def _run_config(storage: str, max_failures: int, on_death: Callable[..., None] | None) -> RunConfig:
    return RunConfig(
        name=uuid.uuid4().hex[:12],
        storage_path=storage,
        failure_config=FailureConfig(
            max_failures=max_failures - 1, controller_failure_limit=MAX_START_FAILURES
        ),
        logging_config=LoggingConfig(log_level="ERROR"),
        callbacks=[DeathReporter(on_death)] if on_death else [],
    )


def _trainer(
    worker: Callable[[dict[str, Any]], WorkerResult],
    settings: dict[str, Any],
    placement: Placement,
    run: RunConfig,
) -> TorchTrainer:
    gpus = {"GPU": placement.gpus} if placement.gpus else {}
    return TorchTrainer(
        worker,
        train_loop_config=settings,
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=placement.workers,
            use_gpu=bool(gpus),
            resources_per_worker={"CPU": placement.cpus, **gpus},
        ),
        run_config=run,
    )


class DeathReporter(UserCallback):
    """Reports what workers died of; Ray Train runs it in the process of its controller."""

    def __init__(self, on_death: Callable[..., None]):
        self.on_death = on_death

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        for rank, error in worker_exceptions.items():
            self.on_death(error=f"training worker {rank}: {last_line(error)}")


def _absolute(spec: TrainSpec) -> TrainSpec:
    """The same with absolute paths: Ray Train moves its workers to a directory of its own."""
    shards, texts = (tuple(map(os.path.abspath, paths)) for paths in (spec.shards, spec.texts))
    return replace(spec, shards=shards, texts=texts, directory=os.path.abspath(spec.directory))


def run_worker(config: dict[str, Any]) -> WorkerResult:
    """What every worker runs; Ray has formed the process group and chosen the GPU.

    An error that a restart would only repeat is handed back. Where this worker may be the only one
    to meet it, it is raised instead: the others wait for this one, and Ray has to end them.
    """
    import torch

    torch.set_num_threads(config["cpus"])
    context = get_context()
    workers = Workers(context.get_world_rank(), context.get_world_size())
    progress = config["progress"] if workers.is_first else None
    summary, error = run_and_carry_errors(
        train, {"spec": config["spec"], "workers": workers, "progress": progress}
    )
    if error and workers.world_size > 1 and not isinstance(error, CheckFailed | ConfigError):
        raise error
    return summary, error


def _readable(error: Exception, spec: TrainSpec) -> MedusaDistillError:
    """The error that a worker meant for the user, or what Ray says of its end."""
    failures = list(getattr(error, "worker_failures", {}).values())
    for failure in failures:
        if isinstance(failure, MedusaDistillError):
            return failure
    said = last_line(failures[0] if failures else error)
    fix = (
        "If memory ran out, lower train.batch_tokens. The same command continues from the newest"
        " checkpoint."
    )
    return EnvironmentFault(f"Training workers died too often: {said}.", spec.directory, fix)
