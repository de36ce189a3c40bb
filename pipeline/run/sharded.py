"""Run a stage's worker over its pending shards, retry failed ones, and stop after repeated failures."""

from __future__ import annotations

import functools
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipeline.config import LimitsConfig
from pipeline.errors import EnvironmentFault
from pipeline.execution.executor import Outcome, ShardWorker
from pipeline.execution.isolation import find_poison
from pipeline.execution.placement import Placement
from pipeline.run.context import Context
from pipeline.storage.done import Summary
from pipeline.storage.stage_directory import StageDirectory
from pipeline.storage.tasks import ShardTask
from pipeline.storage.totals import StageTotals


def run_sharded(
    context: Context,
    stage: StageDirectory,
    upstream: StageDirectory,
    worker: Callable[..., ShardWorker],
    arguments: dict[str, Any],
    placement: Placement,
    unit: str,
) -> Summary:
    """Make every shard of `stage` exist.

    Args:
        worker: A class whose instances take a `ShardTask` and return its `Receipt`.
        arguments: What the class is constructed with, in the worker's own process.
        unit: The receipt's statistic that the rate is shown in: `tokens` or `positions`.

    Returns:
        Totals over all shards, see `StageTotals.summary`.

    Raises:
        MedusaDistillError: A worker says so; too much was quarantined; the disk is nearly full.
    """
    limits = context.config.limits
    tasks = stage.tasks(upstream)
    stage.drop_shards_but({task.index for task in tasks})
    failures: Counter[int] = Counter()
    poison: dict[int, dict[str, str]] = {}
    have = stage.receipts()
    pending = deque(stage.pending(tasks, have))
    unfinished = {task.index for task in pending}
    totals = StageTotals(receipt for index, receipt in have.items() if index not in unfinished)
    started, before = time.monotonic(), totals.stats[unit]
    seconds = limits.max_hours_per_shard * 3600
    map_tasks = functools.partial(
        context.executor.map, worker, arguments, placement=placement, seconds_per_task=seconds
    )
    with context.meter(stage.stage, len(tasks), done=totals.shards) as meter:
        while pending:
            killers: list[Outcome] = []
            for outcome in map_tasks(pending):
                _record(context, stage, outcome)
                if outcome.receipt:
                    totals.add(outcome.receipt)
                    rate = (totals.stats[unit] - before) / max(time.monotonic() - started, 1e-9)
                    meter.advance(_note(rate, unit, totals.quarantined))
                    _check_disk(limits, stage)
                    totals.check_quarantine(stage.stage, str(stage.path), limits.max_quarantine_fraction, final=False)
                elif _again(limits, stage, outcome, failures):
                    pending.append(outcome.task)
                else:
                    killers.append(outcome)
            for killer in killers:
                context.console.print(f"{stage.stage}: looking for what kills the worker in shard {killer.task.index}")
                found = find_poison(map_tasks, killer, stage, limits.max_consecutive_failures)
                if found == poison.get(killer.task.index):
                    raise _unexplained(stage, killer)
                poison[killer.task.index] = found
            have = stage.receipts()
            pending.extend(replace(task, poison=poison.get(task.index, {})) for task in stage.pending(tasks, have))
            searched = {killer.task.index for killer in killers}
            _count_unseen(limits, stage, [task for task in pending if task.index not in searched], failures)
    totals = StageTotals(have.values())
    totals.check_quarantine(stage.stage, str(stage.path), limits.max_quarantine_fraction, final=True)
    return totals.summary()


def _record(context: Context, stage: StageDirectory, outcome: Outcome) -> None:
    facts: dict[str, Any] = {"stage": stage.stage, "shard": outcome.task.index}
    if receipt := outcome.receipt:
        busy = {"busy_seconds": receipt.note.busy_seconds} if receipt.note else {}
        context.run.event(
            "shard", **facts, rows=receipt.num_rows, quarantined=receipt.num_quarantined, **receipt.stats, **busy
        )
    elif outcome.death:
        context.run.event("worker-died", **facts, error=outcome.death)
    else:
        context.run.event("shard-failed", **facts, error=str(outcome.error or outcome.traceback))


def _again(limits: LimitsConfig, stage: StageDirectory, outcome: Outcome, failures: Counter[int]) -> bool:
    """Whether a failed shard is to be tried again; False where its rows have to be looked at one by one."""
    if outcome.error:
        raise outcome.error
    index = outcome.task.index
    failures[index] += 1
    if failures[index] < limits.max_consecutive_failures:
        return True
    if outcome.death:
        failures[index] = 0
        return False
    last = outcome.traceback.strip().splitlines()[-1]
    raise EnvironmentFault(
        f"Shard {index} of {stage.stage} failed {limits.max_consecutive_failures} times, last with: {last}.",
        str(stage.path),
        "The full traceback is in events.jsonl. Everything that was committed is kept; the same command continues.",
    )


def _unexplained(stage: StageDirectory, killer: Outcome) -> EnvironmentFault:
    return EnvironmentFault(
        f"Shard {killer.task.index} of {stage.stage} ends its worker again and again, and not when tried by itself: "
        f"{killer.death.splitlines()[0].rstrip('.')}.",
        str(stage.path),
        "If memory runs out, use smaller batches or fewer workers. What was committed is kept; run it again.",
    )


def _count_unseen(limits: LimitsConfig, stage: StageDirectory, unseen: list[ShardTask], failures: Counter[int]) -> None:
    """Raise where workers commit shards that this process cannot see, instead of repeating them."""
    failures.update(task.index for task in unseen)
    if any(failures[task.index] >= limits.max_consecutive_failures for task in unseen):
        raise EnvironmentFault(
            f"Workers committed shards of {stage.stage} that are not to be seen here, "
            f"{[task.index for task in unseen[:3]]} among them.",
            str(stage.path),
            "run.root and run.store must be on storage that every node sees.",
        )


def _note(rate: float, unit: str, quarantined: int) -> str:
    return f"{rate:,.0f} {unit}/s" + (f", {quarantined} quarantined" if quarantined else "")


def _check_disk(limits: LimitsConfig, stage: StageDirectory) -> None:
    free = shutil.disk_usage(stage.path).free / 1e9
    if free < limits.min_free_disk_gb:
        raise EnvironmentFault(
            f"The disk has {free:.1f} GB left, less than limits.min_free_disk_gb = {limits.min_free_disk_gb}.",
            str(stage.path),
            "Free some space and run the same command again: it continues where it stopped.",
        )
