"""Trainings that tests stop, step and share."""

from __future__ import annotations

import torch

from pipeline.execution.progress import Progress, ProgressReporter
from pipeline.training.phases import phases_of
from pipeline.training.task import TrainSpec, Workers
from pipeline.training.trainer import Trainer


class Stopped(Exception):
    """Stands for whatever ends a run early."""


def stop_at(step: int) -> ProgressReporter:
    def show(now: Progress) -> None:
        if now.done == step:
            raise Stopped

    return ProgressReporter(show=show)


def trainer_of(spec: TrainSpec, workers: Workers | None = None) -> Trainer:
    """The trainer of a spec's last phase, before its first step, on a CPU."""
    _, of_phase, learner = phases_of(spec)[-1]
    torch.manual_seed(spec.seed)
    return Trainer(learner(of_phase, workers or Workers(), torch.device("cpu")))
