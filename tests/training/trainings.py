"""Trainings that tests stop, step and compare."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from pipeline.execution.progress import Progress, ProgressReporter
from pipeline.training.metrics import read_metrics
from pipeline.training.task import TrainSpec, Workers
from pipeline.training.trainer import Trainer


class Stopped(Exception):
    """Ends a run early."""


def stop_at(step: int, phase: str = "") -> ProgressReporter:
    def show(now: Progress) -> None:
        if now.done == step and now.part == phase:
            raise Stopped

    return ProgressReporter(show=show)


def team(world_size: int) -> list[Workers]:
    """All workers of a training."""
    return [Workers(rank, world_size) for rank in range(world_size)]


def trainer_of(spec: TrainSpec, workers: Workers | None = None) -> Trainer:
    """The trainer of a spec's last phase, before its first step, on a CPU."""
    name, learner = spec.phases[-1]
    torch.manual_seed(spec.seed)
    return Trainer(learner(spec.of_phase(name), workers or Workers(), torch.device("cpu")))


def weights(spec: TrainSpec) -> dict[str, torch.Tensor]:
    """Heads, and the adapter if there is one."""
    found = load_file(spec.heads_path)
    adapter = spec.adapter_path / "adapter_model.safetensors"
    if adapter.exists():
        found.update(load_file(adapter))
    return found


def same_weights(one: TrainSpec, other: TrainSpec) -> bool:
    ours, theirs = weights(one), weights(other)
    equal = [torch.equal(ours[name], theirs[name]) for name in ours]
    return ours.keys() == theirs.keys() and all(equal)


def same_curve(one: Path, other: Path) -> bool:
    """Whether two metrics.jsonl agree but for the rate, with each step once."""
    ours, theirs = list(read_metrics(one)), list(read_metrics(other))
    for line in (*ours, *theirs):
        line.pop("tokens_per_second", None)
    return ours == theirs and [line["step"] for line in ours] == list(range(len(ours)))
