"""The lines of `medusa-distill plan` on time: measured rates where the store has some, else
arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.formatting import duration, rate
from pipeline.run.estimate import RunSize
from pipeline.run.hours import Hours, Rates, rates_of_sections
from pipeline.run.resolved import SECTIONS, ResolvedRun
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.sizes import TargetSizes

TIMED_STAGES = {"generate": "tokens", "features": "positions", "train": "tokens"}
"""Stages whose rates are measured, and the figure of their summary that measures the work."""
DAY = 24 * 3600
DRAFT_VOCAB = 32_000  # that is advised: Llama 2's whole vocabulary
MUCH_LESS = 0.8  # of the time of training


@dataclass(frozen=True)
class StageTime:
    """The seconds that a stage is expected to take."""

    stage: str
    seconds: float
    source: str  # as `plan` prints it


def time_lines(
    run: ResolvedRun,
    size: RunSize,
    target: TargetSizes | None,
    store: Path,
    unfinished: Sequence[str],
    *,
    is_bound: bool,
) -> Iterator[str]:
    """Yield lines of `plan` on the time of unfinished stages; warn if it is more than a day.

    Args:
        target: The sizes of the target; None if they are not known.
        is_bound: Whether `size` is that of the longest answers.
    """
    if not unfinished:
        return
    if size.tokens is None:
        yield "Hours are unknown: set a limit for each data set on the Hub (seeds.sources)."
        return
    rates = rates_of_sections(run, target) if target else None
    hours = Hours(run, size, target, rates) if target and rates else None
    times = list(_times(run, size, hours, store, unfinished))
    bound = "up to about" if is_bound else "about"
    for each in times:
        yield f"{each.stage}: {bound} {duration(each.seconds)}, {each.source}."
    total = sum(each.seconds for each in times)
    if hours is not None and rates is not None:
        shown = _shown(rates["train"])
        yield (
            f"Together {bound} {duration(total)}. By arithmetic (training at {shown}) a time is"
            " right within a factor of two; downloads and studies are not in it."
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


def _times(
    run: ResolvedRun, size: RunSize, hours: Hours | None, store: Path, unfinished: Sequence[str]
) -> Iterator[StageTime]:
    """Yield the time of each unfinished stage that has a measured rate, or else arithmetic."""
    arithmetic = hours.stages() if hours else {}
    for stage in unfinished:
        measured = _measured(run, size, store, stage)
        if measured is not None:
            yield measured
        elif stage in arithmetic:
            yield StageTime(stage, arithmetic[stage], "by arithmetic")


def _measured(run: ResolvedRun, size: RunSize, store: Path, stage: str) -> StageTime | None:
    """Return the time of a stage at the rate of its newest result in the store, or None."""
    newest = newest_result(store, stage) if stage in TIMED_STAGES else None
    if newest is None or size.tokens is None:
        return None
    summary = newest.summary
    if not summary.get("tokens_per_second") or not summary.get("tokens"):
        return None
    speed = summary["tokens_per_second"] * summary[TIMED_STAGES[stage]] / summary["tokens"]
    if stage == "train":  # its rate is that of all workers
        work = sum(recipe.total_steps * recipe.batch_tokens for recipe in size.recipes)
        seconds = work / speed
    else:
        seconds = size.tokens / (speed * run.workers_of(stage))
    return StageTime(stage, seconds, f"at the {rate(speed)} tokens/s of {newest.path.name}")


def _shown(rates: Rates) -> str:
    """Return the rates of a device as `plan` prints them."""
    return f"{rates.operations / 1e12:,.2g} TFLOP/s and {rates.num_bytes / 1e9:,.2g} GB/s"


def _what_helps(
    run: ResolvedRun, size: RunSize, hours: Hours | None, times: Sequence[StageTime]
) -> list[str]:
    """Return what makes a run shorter: a GPU, settings of training, fewer conversations."""
    longest = max(times, key=lambda each: each.seconds)
    helps = []
    if not run.gpus_of(SECTIONS.get(longest.stage, "generate")):
        helps.append("a GPU")
    if hours is not None and longest.stage == "train":
        before = hours.training()
        for setting, seconds in sorted(_shorter_trainings(hours).items(), key=lambda each: each[1]):
            if seconds < MUCH_LESS * before:
                helps.append(f"{setting} (train: {duration(longest.seconds * seconds / before)})")
    fewer = int((size.conversations or 0) * DAY / sum(each.seconds for each in times))
    helps.append(f"a limit in seeds.sources ({fewer:,} conversations take a day)")
    return helps


def _shorter_trainings(hours: Hours) -> dict[str, float]:
    """Return the seconds of training with settings that may make it shorter, by setting."""
    run, train = hours.run, hours.run.config.train
    hidden_size, vocab_size = run.shape.hidden_size, run.shape.vocab_size
    smaller = train.recurrent.model_copy(update={"intermediate_size": hidden_size})
    changes: dict[str, dict[str, object]] = {}
    changes[f"train.recurrent.intermediate_size={hidden_size}"] = {"recurrent": smaller}
    if vocab_size > DRAFT_VOCAB:
        changes[f"train.draft_vocab={DRAFT_VOCAB}"] = {"draft_vocab": DRAFT_VOCAB}
    found = {}
    for setting, change in changes.items():
        changed = train.model_copy(update=change)
        config = run.config.model_copy(update={"train": changed})
        shape = run.kind.shape_of(changed, hidden_size, vocab_size)
        found[setting] = replace(hours, run=replace(run, config=config, shape=shape)).training()
    return found
