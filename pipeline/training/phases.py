"""Training by a method, from beginning to end: its phases, one after another.

Each phase is a training of its own that resumes for itself: all but the last in a directory of
their own within the last one's, each starting from the heads of the one before.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch

from pipeline.artifacts.trained_heads import read_summary
from pipeline.execution.progress import ProgressReporter
from pipeline.training.learner import Learner
from pipeline.training.recipe import Recipe
from pipeline.training.task import TrainSpec, Workers, choose_device, gpu_errors
from pipeline.training.trainer import Trainer


def train(
    spec: TrainSpec, workers: Workers | None = None, progress: ProgressReporter | None = None
) -> dict[str, Any]:
    """Train by the method of the spec; returns {steps, tokens, seconds, tokens_per_second,
    final_loss, held_out, …}.

    Leaves `heads.safetensors`, `summary.jsonl`, `metrics.jsonl`, `checkpoints/`, what trackers keep
    there and what the learner writes. A run that is finished already only returns its summary. The
    summary of an earlier phase stands in it under that phase's name.

    Raises:
        CheckFailed: The loss or its gradient is no longer finite.
        ConfigError: The target cannot be trained on: see the method's learners.
        DataError: A shard is damaged or of another run or target, there is nothing to learn, or
            heads of another shape lie where these are to be.
        EnvironmentFault: The GPU or bitsandbytes is missing, memory is too small, or the disk is
            full.
    """
    if summary := finished(spec):
        return summary
    workers, progress = workers or Workers(), progress or ProgressReporter()
    phases = phases_of(spec)
    later = [learner.recipe_of(of_phase).total_steps for _, of_phase, learner in phases[1:]]
    done, heads_from, summaries = 0, None, {}
    for number, (name, of_phase, learner) in enumerate(phases):
        of_phase.path.mkdir(exist_ok=True)
        if (summary := read_summary(of_phase.heads_path, of_phase.heads_shape)) is None:
            device = choose_device(spec)
            generators = [device] if device.type == "cuda" else []
            with gpu_errors(spec, learner.saves_memory), torch.random.fork_rng(generators):
                torch.manual_seed(spec.seed)  # every worker draws the same
                steps_after = sum(later[number:])
                summary = Trainer(learner(of_phase, workers, device, heads_from)).run(
                    progress, done, steps_after
                )
            gc.collect()  # its weights and moments; the next phase needs their memory
            workers.wait()  # for the first to write the heads
        done, heads_from = done + summary["steps"], of_phase.heads_path
        summaries[name] = summary
    return summaries.pop("") | summaries


def phases_of(spec: TrainSpec) -> list[tuple[str, TrainSpec, type[Learner]]]:
    """Each phase's name, its spec with its own directory, and its learner; the last one's name is
    empty.
    """
    phases = spec.method.phases(spec.settings)
    return [
        (
            name.replace("-", "_"),
            replace(spec, directory=str(spec.path / name), phase=name),
            learner,
        )
        for name, learner in phases
    ]


def finished(spec: TrainSpec) -> dict[str, Any] | None:
    """The summary of a training that is over; None of one that is not.

    Raises:
        DataError: Heads of another shape lie where these are to be.
    """
    summaries = {
        name: read_summary(each.heads_path, each.heads_shape) for name, each, _ in phases_of(spec)
    }
    last = summaries.pop("")
    return None if last is None else last | summaries


def recipes_of(spec: TrainSpec) -> list[Recipe]:
    """The recipe of each phase; reads what they train from, and refuses what is bad of it."""
    return [learner.recipe_of(of_phase) for _, of_phase, learner in phases_of(spec)]


def count_steps(spec: TrainSpec) -> int:
    """Optimizer steps of all phases, if none ends early; reads as `recipes_of` does."""
    return sum(recipe.total_steps for recipe in recipes_of(spec))
