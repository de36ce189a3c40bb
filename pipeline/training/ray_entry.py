"""Training on a Ray cluster: Ray Train starts the workers, forms their process group, and restarts them when one dies.

Resume is ours: the workers report no checkpoint to Ray, so a restarted group (or a new driver) reads on from the newest
whole checkpoint in the stage directory. Ray's own bookkeeping therefore has a name of its own in every call and is
removed afterwards. Each worker computes on one device, however many GPUs it reserves.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback, get_context
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.config import LoggingConfig

from pipeline.errors import CheckFailed, ConfigError, EnvironmentFault, MedusaDistillError
from pipeline.training.state import Progress
from pipeline.training.task import TrainSpec
from pipeline.training.two_stage import finished, last_step, steps_before, steps_of, train
from pipeline.training.world import World

MAX_START_FAILURES = 10  # a minute each: a cluster that scales up needs some
SECONDS_BETWEEN_LOOKS = 0.5
DEATHS = "deaths.jsonl"

Outcome = tuple[dict[str, Any], MedusaDistillError | None]
"""The first worker's summary, or what the user is to be told."""


def train_on_ray(
    spec: TrainSpec,
    workers: int,
    cpus: int,
    gpus: int,
    max_failures: int,
    on_progress: Progress | None = None,
    on_death: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """`train` on `workers` workers with `cpus` cores and `gpus` GPUs each; returns the first worker's summary.

    A worker's death restarts the group from the newest checkpoint, all in all less than `max_failures` times, and
    `on_death` is told of it. Ray is initialised already. A finished run only returns its summary: Ray Train would start
    workers for nothing.

    Raises:
        MedusaDistillError: What a worker raised, as it is.
        EnvironmentFault: Workers died too often.
    """
    if summary := finished(spec):
        return summary
    total_steps = steps_of(spec)  # also: bad data is refused here, before anything is started
    spec = _absolute(spec)
    bookkeeping = spec.path / "ray"
    bookkeeping.mkdir(exist_ok=True)
    fit = ray.remote(num_cpus=0, max_retries=0)(_fit).remote(_worker, spec, workers, cpus, gpus, max_failures)
    try:
        return _follow(fit, spec, total_steps, on_progress)
    finally:
        for death in _deaths(bookkeeping / DEATHS):
            if on_death:
                on_death(death)
        shutil.rmtree(bookkeeping, ignore_errors=True)


def _fit(
    worker: Callable[[dict[str, Any]], Outcome], spec: TrainSpec, workers: int, cpus: int, gpus: int, max_failures: int
) -> Outcome:
    """Let Ray Train fit by that many of these workers, and return what the first worker does.

    It runs in a Ray task: `fit` waits, takes SIGINT for itself, and in a thread of the driver it would not survive
    that Ray is shut down, which is how a driver stops.
    """
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", str(SECONDS_BETWEEN_LOOKS))
    resources = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
    bookkeeping = spec.path / "ray"
    trainer = TorchTrainer(
        worker,
        train_loop_config={"spec": spec, "cpus": cpus},
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus > 0, resources_per_worker=resources),
        run_config=RunConfig(
            name=uuid.uuid4().hex[:12],
            storage_path=str(bookkeeping),
            failure_config=FailureConfig(max_failures=max_failures - 1, controller_failure_limit=MAX_START_FAILURES),
            logging_config=LoggingConfig(log_level="ERROR"),
            callbacks=[DeathLog(str(bookkeeping / DEATHS))],
        ),
    )
    try:
        return trainer.fit().return_value
    except Exception as error:
        return {}, _readable(error, spec)


class DeathLog(UserCallback):
    """Writes down what workers died of: Ray Train runs this in its controller, a process that nobody hears."""

    def __init__(self, path: str):
        self.path = path

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            for rank, error in worker_exceptions.items():
                file.write(json.dumps(f"training worker {rank}: {_last_line(error)}") + "\n")


def _deaths(path: Path) -> list[str]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _last_line(error: Exception) -> str:
    """The last line of what an error says: Ray puts its own frames before it."""
    return (str(error).strip().splitlines() or [repr(error)])[-1].rstrip(".")


def _absolute(spec: TrainSpec) -> TrainSpec:
    """The same with absolute paths: Ray Train moves its workers to a directory of its own."""
    shards, texts = (tuple(map(os.path.abspath, paths)) for paths in (spec.shards, spec.texts))
    return replace(spec, shards=shards, texts=texts, directory=os.path.abspath(spec.directory))


def _worker(config: dict[str, Any]) -> Outcome:
    """What every worker runs; Ray has formed the process group and chosen the GPU.

    An error that a restart would only repeat is handed back. Where this worker may be the only one to meet it, it is
    raised instead: the others wait for this one, and Ray has to end them.
    """
    import torch

    torch.set_num_threads(config["cpus"])
    context = get_context()
    world = World(context.get_world_rank(), context.get_world_size())
    try:
        return train(config["spec"], world), None
    except MedusaDistillError as error:
        if world.size > 1 and not isinstance(error, CheckFailed | ConfigError):
            raise
        return {}, error


def _follow(fit: Any, spec: TrainSpec, total_steps: int, on_progress: Progress | None) -> dict[str, Any]:
    """Show progress until the fit has ended."""
    shown, before = -1, steps_before(spec)
    waiting = [fit]
    while waiting:
        _, waiting = ray.wait(waiting, timeout=SECONDS_BETWEEN_LOOKS)
        line = last_step(spec, before)
        if on_progress and line and line["step"] != shown:
            shown = line["step"]
            on_progress(shown, total_steps, line["loss"], line["tokens_per_second"])
    try:
        summary, error = ray.get(fit)
    except ray.exceptions.RayError as death:
        raise _readable(death, spec) from death
    if error:
        raise error
    return summary


def _readable(error: Exception, spec: TrainSpec) -> MedusaDistillError:
    """The error that a worker meant for the user, or what Ray says of its end."""
    failures = list(getattr(error, "worker_failures", {}).values())
    for failure in failures:
        if isinstance(failure, MedusaDistillError):
            return failure
    said = _last_line(failures[0] if failures else error)
    fix = "If memory ran out, lower train.batch_tokens. The same command continues from the newest checkpoint."
    return EnvironmentFault(f"Training workers died too often: {said}.", spec.directory, fix)
