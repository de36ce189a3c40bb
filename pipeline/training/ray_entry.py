"""Training on a Ray cluster: Ray Train starts the workers and restarts them when one dies.

The workers report no checkpoint to Ray: a restarted worker group (or a new driver) resumes from the
newest checkpoint in the stage directory. Ray's own files are not needed for that, so they have a
new name in every call and are removed afterwards. Each worker computes on one device, even if it
reserves several GPUs.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback, get_context
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.config import LoggingConfig

from pipeline.errors import (
    CheckFailed,
    ConfigError,
    EnvironmentFault,
    MedusaDistillError,
    StoppedAtCheckpoint,
)
from pipeline.execution.placement import Placement
from pipeline.execution.progress import SILENT, ProgressReporter
from pipeline.execution.ray_executor import run_and_carry_errors
from pipeline.targets.spec import last_line
from pipeline.training.task import TrainResult, TrainSpec, Workers
from pipeline.training.trainer import train

OF_ALL_WORKERS = (CheckFailed, ConfigError, StoppedAtCheckpoint)
MAX_START_FAILURES = 10  # about a minute each, while a cluster scales up

WorkerResult = tuple[TrainResult | None, MedusaDistillError | None]
"""What `run_worker` returns: the training's result, or the user's error."""


def train_on_ray(
    spec: TrainSpec,
    placement: Placement,
    max_failures: int,
    on_death: Callable[..., None],
    progress: ProgressReporter = SILENT,
) -> TrainResult:
    """Train on Ray workers and return the first worker's result.

    This function must run in a Ray task, not in the driver, because Ray Train's `fit` blocks and
    handles SIGINT itself.

    Args:
        spec: The training.
        placement: The number of workers, and the CPUs and GPUs of each.
        max_failures: The number of failures at which training ends; a failure is a worker's death
            or an error that `run_worker` raises. After fewer failures the worker group restarts
            from the newest checkpoint.
        on_death: Called with `error="..."` for each worker that failed, in the process of Ray
            Train's controller; picklable.
        progress: Updated by the first worker.

    Raises:
        MedusaDistillError: A worker returned this error, or raised it at the last failure.
        EnvironmentFault: Workers died too often, or Ray could not start them.
    """
    # Absolute paths: Ray Train moves its workers to a directory of its own.
    spec = replace(
        spec,
        shards=tuple(map(Path.absolute, spec.shards)),
        texts=tuple(map(Path.absolute, spec.texts)),
        directory=os.path.abspath(spec.directory),
    )
    bookkeeping = spec.path / "ray"
    bookkeeping.mkdir(exist_ok=True)
    # At Ray's default of 2 s a finished training returned about 1 s later than at 0.5 s.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    trainer = TorchTrainer(
        run_worker,
        train_loop_config={"spec": spec, "cpus": placement.cpus, "progress": progress},
        torch_config=TorchConfig(backend="nccl" if placement.gpus else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=placement.workers,
            use_gpu=bool(placement.gpus),
            resources_per_worker={"CPU": placement.cpus, "GPU": placement.gpus},
        ),
        run_config=RunConfig(
            name=uuid.uuid4().hex[:12],
            storage_path=str(bookkeeping),
            failure_config=FailureConfig(
                max_failures=max_failures - 1, controller_failure_limit=MAX_START_FAILURES
            ),
            logging_config=LoggingConfig(log_level="ERROR"),
            callbacks=[DeathReporter(on_death)],
        ),
    )
    try:
        outcome = trainer.fit().return_value
    except Exception as failure:
        raise _training_error(failure, spec) from failure
    finally:
        shutil.rmtree(bookkeeping, ignore_errors=True)
    result, error = outcome
    if error:
        raise error
    assert result is not None, "a worker without an error returns a result"
    return result


class DeathReporter(UserCallback):
    """Ray Train callback that reports each training worker that died or raised an error."""

    def __init__(self, on_death: Callable[..., None]):
        self.on_death = on_death

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Call `on_death` for each failed worker, with its rank and the last line of its error."""
        for rank, error in worker_exceptions.items():
            self.on_death(error=f"training worker {rank}: {last_line(error)}")


def run_worker(config: dict[str, Any]) -> WorkerResult:
    """Train as one Ray Train worker, in the process group that Ray has set up.

    Returns (result, None), or (None, error) for an error meant for the user. With several workers,
    only errors of `OF_ALL_WORKERS` are returned. Any other error may occur on this worker alone and
    is raised, so that Ray ends the workers that wait for it.
    """
    import torch

    torch.set_num_threads(config["cpus"])
    context = get_context()
    workers = Workers(context.get_world_rank(), context.get_world_size())
    progress = config["progress"] if workers.is_first else SILENT
    result, error = run_and_carry_errors(
        train, {"spec": config["spec"], "workers": workers, "progress": progress}
    )
    if error and workers.world_size > 1 and not isinstance(error, OF_ALL_WORKERS):
        raise error
    return result, error


def _training_error(error: Exception, spec: TrainSpec) -> MedusaDistillError:
    """Return the error to raise when Ray Train failed with `error`.

    It is the first MedusaDistillError that a worker raised. If there is none, it is an
    EnvironmentFault with the last line of the first worker's error, or of `error`.
    """
    failures = list(getattr(error, "worker_failures", {}).values())
    for failure in failures:
        if isinstance(failure, MedusaDistillError):
            return failure
    said = last_line(failures[0] if failures else error)
    return EnvironmentFault(
        f"Training workers died too often: {said}.",
        spec.directory,
        "If memory ran out, lower train.batch_tokens. The same command continues from the newest"
        " checkpoint.",
    )
