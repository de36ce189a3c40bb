"""One training, or heads first and then heads and backbone together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.artifacts.trained_heads import read_summary
from pipeline.training.medusa1 import count_steps, open_features, train_medusa1
from pipeline.training.medusa2 import open_texts, text_plan, train_medusa2
from pipeline.training.methods import HeadsOnly
from pipeline.training.metrics import last_metrics
from pipeline.training.state import Progress
from pipeline.training.task import TrainSpec
from pipeline.training.world import World

HEADS_FIRST = "heads-first"


def train(spec: TrainSpec, world: World | None = None, on_progress: Progress | None = None) -> dict[str, Any]:
    """Train by the method and the recipe of the settings; returns that training's summary.

    Of two stages the first has a directory of its own in the second's, `heads-first/`, and stands in the summary under
    `heads_first`. Each resumes for itself.

    Raises:
        MedusaDistillError: As `train_medusa1` and `train_medusa2` do.
    """
    if not _has_two_stages(spec):
        method = train_medusa2 if spec.method.tunes_backbone else train_medusa1
        return method(spec, world, on_progress)
    first = heads_first(spec)
    first.path.mkdir(exist_ok=True)
    before, total = steps_before(spec), steps_of(spec)

    def shown(start: int) -> Progress | None:
        def show(step: int, _: int, loss: float, rate: float) -> None:
            assert on_progress
            on_progress(start + step, total, loss, rate)

        return show if on_progress else None

    world = world or World()
    summary = train_medusa1(first, world, shown(0))
    world.wait()  # for the first worker to write the heads
    return train_medusa2(spec, world, shown(before), first.heads_path) | {"heads_first": summary}


def finished(spec: TrainSpec) -> dict[str, Any] | None:
    """The summary of a training that is over; None of one that is not.

    Raises:
        DataError: Heads of another shape lie where these are to be.
    """
    summary = read_summary(spec.heads_path, spec.heads_shape)
    if summary is None or not _has_two_stages(spec):
        return summary
    return summary | {"heads_first": finished(heads_first(spec))}


def heads_first(spec: TrainSpec) -> TrainSpec:
    """The first of two stages: Medusa-1 from the cache."""
    return replace(spec, method=HeadsOnly(), directory=str(spec.path / HEADS_FIRST))


def steps_of(spec: TrainSpec) -> int:
    """Optimizer steps of the whole training; reads what it trains from, and refuses what is bad of it."""
    if not spec.method.tunes_backbone:
        return count_steps(spec, open_features(spec))
    plan = text_plan(spec, open_texts(spec)["train"])
    return steps_before(spec) + plan.steps_per_epoch * spec.settings.epochs


def steps_before(spec: TrainSpec) -> int:
    """Those of them that are the first of two stages'."""
    return steps_of(heads_first(spec)) if _has_two_stages(spec) else 0


def last_step(spec: TrainSpec, before: int) -> dict[str, Any] | None:
    """The newest line of metrics with a loss, its step counted from the very first; `before` as `steps_before` says."""
    if line := _with_loss(spec):
        return line | {"step": before + line["step"]}
    return _with_loss(heads_first(spec)) if _has_two_stages(spec) else None


def _has_two_stages(spec: TrainSpec) -> bool:
    return spec.method.tunes_backbone and spec.settings.backbone.recipe == "two-stage"


def _with_loss(spec: TrainSpec) -> dict[str, Any] | None:
    line = last_metrics(spec.path)
    return line if line and "loss" in line else None
