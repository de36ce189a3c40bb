"""The lines of `medusa-distill plan` on time: measured rates where the store has some, else
arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.formatting import duration, rate
from pipeline.run.estimate import RunSize
from pipeline.run.hours import Hours, rates_of_sections
from pipeline.run.resolved import SECTIONS, ResolvedRun
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.sizes import TargetSizes

TIMED_STAGES = {"generate": "tokens", "features": "positions", "train": "tokens"}
"""Stages whose rates are measured, and the figure of their summary that measures the work."""
DAY = 24 * 3600
DRAFT_VOCAB = 32_000  # that is advised: Llama 2's whole vocabulary
MUCH_LESS = 0.8  # of the time of training


def time_lines(
    run: ResolvedRun,
    size: RunSize,
    target: TargetSizes | None,
    store: Path,
    unfinished: Sequence[str],
) -> Iterator[str]:
    """Yield lines of `plan` on the time of unfinished stages; warn if it is more than a day.

    Args:
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
    bound = "up to about" if size.bound == "at most" else "about"
    times = {}
    for stage in unfinished:
        measured = _measured(run, size, store, stage)
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
        speed = hours.rates["train"]
        yield (
            f"Together {bound} {duration(total)}. By arithmetic (training at"
            f" {speed.operations / 1e12:,.2g} TFLOP/s and {speed.num_bytes / 1e9:,.2g} GB/s) a time"
            " is right within a factor of two; downloads and studies are not in it."
        )
    elif target is not None:
        yield (
            "Other hours are unknown: give placement.gpu_memory_gb, placement.gpu_tflops and"
            " placement.gpu_bandwidth_gbs."
        )
    if total > DAY:
        helps = _what_helps(run, size, hours, times)
        yield f"! This takes more than a day. What helps most: {'; '.join(helps)}."


def newest_result(store: Path, stage: str) -> StageDirectory | None:
    """Return the newest finished directory of a stage in a store, or None."""
    done = sorted(store.glob(f"{stage}-*/DONE.json"), key=lambda path: path.stat().st_mtime)
    return StageDirectory.at(done[-1].parent) if done else None


def _measured(run: ResolvedRun, size: RunSize, store: Path, stage: str) -> tuple[float, str] | None:
    """Return a stage's seconds at the rate of its newest result in the store, and the source.

    The result is None if there is no rate.
    """
    newest = newest_result(store, stage) if stage in TIMED_STAGES else None
    summary = newest.summary if newest else {}
    if newest is None or not summary.get("tokens_per_second") or not summary.get("tokens"):
        return None
    speed = summary["tokens_per_second"] * summary[TIMED_STAGES[stage]] / summary["tokens"]
    if stage == "train":  # its rate is that of all workers
        if not size.recipes:
            return None
        work = sum(recipe.total_steps * recipe.batch_tokens for recipe in size.recipes)
        seconds = work / speed
    else:
        seconds = (size.tokens or 0) / (speed * run.workers_of(stage))
    return seconds, f"at the {rate(speed)} tokens/s of {newest.path.name}"


def _what_helps(
    run: ResolvedRun, size: RunSize, hours: Hours | None, times: Mapping[str, float]
) -> list[str]:
    """Return what makes a run shorter: a GPU, settings of training, fewer conversations."""
    longest = max(times, key=times.__getitem__)
    helps = []
    if not run.gpus_of(SECTIONS.get(longest, "generate")):
        helps.append("a GPU")
    if hours is not None and longest == "train":
        helps += _shorter_trainings(hours)
    fewer = int((size.conversations or 0) * DAY / sum(times.values()))
    return [*helps, f"a limit in seeds.sources ({fewer:,} conversations take a day)"]


def _shorter_trainings(hours: Hours) -> Iterator[str]:
    """Yield the settings that make training much shorter, a draft vocabulary with its time."""
    run, train = hours.run, hours.run.config.train
    changed = train.model_copy(update={"draft_vocab": min(DRAFT_VOCAB, run.shape.vocab_size)})
    config = run.config.model_copy(update={"train": changed})
    shape = run.shape.drafting(changed.draft_vocab)
    seconds = replace(hours, run=replace(run, config=config, shape=shape)).training()
    if seconds < MUCH_LESS * hours.training():
        yield f"train.draft_vocab={DRAFT_VOCAB} (train: {duration(seconds)})"
    yield from run.kind.saves_memory
