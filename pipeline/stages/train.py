"""train: train the heads with `train.method`, on cached states or together with the backbone.

Only rows of the split `train` are trained on. An interrupted training continues from its newest
checkpoint. Up to rounding, losses do not depend on the number of workers. A method that tunes the
backbone also writes the LoRA adapter and the merged model (`backbone/`), and measures the drift.
With Ray, Ray Train starts the workers and restarts them if one dies.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from pipeline.config import Config
from pipeline.execution.placement import Placement
from pipeline.execution.progress import ProgressReporter, print_stage
from pipeline.execution.stop_signals import stops_at_checkpoint
from pipeline.export.layout import BACKBONE_DIRECTORY
from pipeline.heads.kinds import reads_rows
from pipeline.run.context import Context, Stage
from pipeline.run.sharded import MAX_FAILURES
from pipeline.storage.receipts import Identity, Summary
from pipeline.storage.stage_directory import StageDirectory
from pipeline.training.adapted_backbone import merge_backbone
from pipeline.training.methods import method_of
from pipeline.training.metrics import TRACKING_FILE
from pipeline.training.recipe import too_few_steps
from pipeline.training.task import TrainResult, TrainSpec
from pipeline.training.trainer import train

NAME = "train"
VERSION = 4
FIGURES = {
    "steps": "steps",
    "final_loss": "final loss",
    "tokens_per_second": "positions per second",
    "drift.kl": "kl",
}

NOTHING_GAINED = (
    "tuning the backbone did not lower the heads' loss on held-out text: the target is unchanged,"
    " and train.method: medusa-1 gives the same heads"
)


def upstream(config: Config) -> tuple[str, ...]:
    """Return the stages that the train stage reads: the method's stages, and row states.

    Row states are read for kinds of heads with `row_layers`.
    """
    stages = method_of(config.train).reads(config.train)
    return (*stages, "row-features") if reads_rows(config.train) else stages


def identity(context: Context) -> Identity:
    """Return what the train stage's result depends on: settings, heads' version, seed, target."""
    resolved = context.resolved
    return {
        "settings": resolved.method.settings(context.config.train, context.target.quantization),
        "heads_version": resolved.kind.version,
        "seed": context.config.run.seed,
        "target": context.target_identity,
    }


def run(context: Context, stage: StageDirectory) -> Summary:
    """Train the heads, merge the adapter of a tuned backbone, and return the training's result."""
    placement, resolved = context.placement(NAME), context.resolved
    method = resolved.method
    warn = functools.partial(print_stage, context.console, "[yellow]![/]", NAME)
    shards, fingerprints = {}, {}
    for name in upstream(context.config):
        shards[name] = tuple(context.upstream[name].shards())
        fingerprints[name] = context.upstream[name].fingerprint
    spec = TrainSpec(
        shards=shards.get("features", ()),
        fingerprint=fingerprints.get("features", ""),
        texts=shards.get("generate", ()),
        texts_fingerprint=fingerprints.get("generate", ""),
        row_shards=shards.get("row-features", ()),
        row_fingerprint=fingerprints.get("row-features", ""),
        settings=context.config.train,
        kind=resolved.kind,
        phases=method.phases(context.config.train),
        target=context.target,
        hidden_size=resolved.shape.hidden_size,
        vocab_size=resolved.shape.vocab_size,
        num_layers=resolved.num_layers,
        seed=context.config.run.seed,
        directory=str(stage.path),
        device="cuda" if placement.gpus else "cpu",
        run_name=context.config.run.name,
        configuration=context.config.model_dump(mode="json"),
    )
    recipes = [learner.recipe_of(spec.of_phase(name)) for name, learner in spec.phases]
    for recipe in recipes:
        print_stage(context.console, " ", NAME, recipe.describe())
    too_few = too_few_steps(recipes)
    if too_few:
        warn(too_few)
    with context.progress(stage) as progress, stops_at_checkpoint(progress):
        result = _train(context, spec, placement, progress)
    if method.tunes_backbone:
        arguments = {"target": context.target, "directory": spec.directory}
        context.executor.call(merge_backbone, arguments, replace(placement, gpus=0))
        result = replace(result, quantization=spec.trained_target.quantization)
    warnings = [too_few] if too_few else []
    if result.earlier and result.best_step == 0:
        warn(NOTHING_GAINED)
        warnings.append(NOTHING_GAINED)
    if method.advice and not result.earlier:  # nothing tells what heads alone would accept
        warnings.append(method.advice)
    for phase in (*result.earlier.values(), result):
        for warning in phase.warnings:
            warn(warning)
            warnings.append(warning)
    return replace(result, warnings=warnings).to_json()


def _train(
    context: Context, spec: TrainSpec, placement: Placement, progress: ProgressReporter
) -> TrainResult:
    """Train in a Ray task or, with the inline executor, in this process; return the result."""
    if context.executor.name != "ray":
        return train(spec, progress=progress)
    from pipeline.training.ray_entry import train_on_ray

    arguments = {
        "spec": spec,
        "placement": placement,
        "max_failures": MAX_FAILURES,
        "on_death": functools.partial(context.run.event, "worker-died", stage=NAME),
    }
    return context.executor.call(train_on_ray, arguments, Placement(1, 0, 0), progress)


STAGE = Stage(
    NAME,
    VERSION,
    upstream,
    identity,
    run,
    FIGURES,
    scratch=("checkpoints", "tensorboard", "wandb", TRACKING_FILE, "ray"),
    parts=(BACKBONE_DIRECTORY,),
)
