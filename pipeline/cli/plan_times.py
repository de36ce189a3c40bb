"""The lines of `medusa-distill plan` on time: measured rates where the store has some, else
arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.errors import MedusaDistillError
from pipeline.formatting import duration, rate
from pipeline.run.context import Context
from pipeline.run.estimate import RunSize
from pipeline.run.hours import Hours, rates_of_sections
from pipeline.run.resolved import ResolvedRun
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.sizes import TargetSizes

TIMED_STAGES = {"generate": "tokens", "features": "positions", "train": "tokens"}
"""Stages whose rates are measured, and the figure of their summary that measures the work."""
DAY = 24 * 3600


def time_lines(
    context: Context,
    run: ResolvedRun,
    size: RunSize,
    target: TargetSizes | None,
    unfinished: Sequence[str],
) -> Iterator[str]:
    """Yield lines of `plan` on the time of unfinished stages; warn if it is more than a day.

    Args:
        run: The run as it is planned, perhaps for other GPUs.
        target: The sizes of the target; None if they are not known.
    """
    if not unfinished:
        return
    if size.tokens is None:
        yield "Hours are unknown: set a limit for each data set on the Hub (seeds.sources)."
        return
    rates = rates_of_sections(run, target) if target else None
    hours = Hours(run, size, target, rates) if target and rates else None
    arithmetic = hours.stages() if hours else {}
    bound = "up to about" if size.is_bound else "about"
    times = {}
    for stage in unfinished:
        measured = _measured(context, run, size, stage)
        if measured is not None:
            times[stage], source = measured
        elif stage in arithmetic:
            times[stage], source = arithmetic[stage], "by arithmetic"
        else:
            continue
        yield f"{stage}: {bound} {duration(times[stage])}, {source}."
    if not times:
        return
    total = sum(times.values())
    if hours is not None:
        yield (
            f"Together {bound} {duration(total)}. Times by arithmetic are right within a factor of"
            " two, and leave out downloads and studies."
        )
    elif target is not None:
        yield (
            "Other times are unknown: set placement.gpu_memory_gb, placement.gpu_tflops and"
            " placement.gpu_bandwidth_gbs."
        )
    if total > DAY:
        longest = max(times, key=times.__getitem__)
        yield f"! This takes more than a day. What helps most: {_what_helps(run, longest)}."


def _what_helps(run: ResolvedRun, longest: str) -> str:
    """Return what makes a run shorter whose longest stage is `longest`."""
    helps = ["more GPUs" if run.gpus_of("generate") else "a GPU", "a limit in seeds.sources"]
    if longest == "train":
        helps += ["train.draft_vocab", *run.kind.saves_memory]
    return ", ".join(helps)


def newest_result(context: Context, stage: str) -> StageDirectory | None:
    """Return the newest finished result of a stage in the run's store for the run's target.

    Of `train`, return a result of the run's kind of heads and training method. The result is None
    if there is no such result, or if the target cannot be read now.
    """
    try:
        target = context.target_identity
    except MedusaDistillError:
        return None
    train = context.config.train
    newest, newest_time = None, 0.0
    for path in context.run.store.glob(f"{stage}-*/DONE.json"):
        found = StageDirectory.at(path.parent)
        settings = found.identity.get("settings", {})
        if settings.get("target") != target:
            continue
        if stage == "train":
            recipe = settings["settings"]
            if (recipe["heads"], recipe["method"]) != (train.heads, train.method):
                continue
        time = path.stat().st_mtime
        if time > newest_time:
            newest, newest_time = found, time
    return newest


def _measured(
    context: Context, run: ResolvedRun, size: RunSize, stage: str
) -> tuple[float, str] | None:
    """Return a stage's seconds at the rate of `newest_result`, and the source of the rate.

    The result is None if there is no rate.
    """
    newest = newest_result(context, stage) if stage in TIMED_STAGES else None
    summary = newest.summary if newest else {}
    if newest is None or not summary.get("tokens_per_second") or not summary.get("tokens"):
        return None
    speed = summary["tokens_per_second"] * summary[TIMED_STAGES[stage]] / summary["tokens"]
    if stage == "train":  # its rate counts all workers
        if not size.recipes:
            return None
        work = sum(recipe.total_steps * recipe.batch_tokens for recipe in size.recipes)
        seconds = work / speed
    else:
        seconds = (size.tokens or 0) / (speed * run.workers_of(stage))
    return seconds, f"at the {rate(speed)} tokens/s of {newest.path.name}"
