"""Run a stage's worker over its pending shards, retry what failed, and stop when it makes no sense to go on."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from pipeline.config import LimitsConfig
from pipeline.conversations.conversation import Reason
from pipeline.errors import DataError, EnvironmentFault
from pipeline.execution.context import Context
from pipeline.execution.executor import Outcome, ShardWorker
from pipeline.execution.placement import Placement
from pipeline.storage.shards import Receipt
from pipeline.storage.stage_directory import StageDirectory


def run_sharded(
    context: Context,
    stage: StageDirectory,
    upstream: StageDirectory,
    worker: Callable[..., ShardWorker],
    arguments: dict[str, Any],
    placement: Placement,
    unit: str,
) -> dict[str, Any]:
    """Make every shard of `stage` exist.

    Args:
        worker: A class whose instances take a `ShardTask` and return its `Receipt`.
        arguments: What the class is constructed with, in the worker's own process.
        unit: The receipt's statistic that the rate is shown in: `tokens` or `positions`.

    Returns:
        Totals over all shards, see `totals`.

    Raises:
        MedusaDistillError: A worker says so; too much was quarantined; the disk is nearly full.
    """
    tasks = stage.tasks(upstream)
    for index in stage.receipts().keys() - {task.index for task in tasks}:  # upstream had more shards once
        stage.shard_path(index).unlink()
        stage.quarantine_path(index).unlink()
    failures: Counter[int] = Counter()
    pending = stage.pending(tasks)
    not_yet = {task.index for task in pending}
    receipts = {index: receipt for index, receipt in stage.receipts().items() if index not in not_yet}
    started, fresh = time.monotonic(), 0.0
    with context.meter(stage.stage, len(tasks), done=len(receipts)) as meter:
        while pending:
            for outcome in context.executor.map(worker, arguments, pending, placement):
                _record(context, stage, outcome)
                if outcome.receipt is None:
                    _after_failure(context.config.limits, stage, outcome, failures)
                    continue
                receipts[outcome.index] = outcome.receipt
                fresh += outcome.receipt.stats.get(unit, 0)
                meter.advance(_note(receipts, fresh, unit, time.monotonic() - started))
                _check_limits(context.config.limits, stage, receipts, final=len(receipts) == len(tasks))
            pending = stage.pending(tasks)
            _after_unseen(context.config.limits, stage, [t.index for t in pending if t.index in receipts], failures)
    _check_limits(context.config.limits, stage, receipts, final=True)
    return totals(receipts)


def totals(receipts: dict[int, Receipt]) -> dict[str, Any]:
    """Sums over receipts; the rate is per second that a worker was busy, so that it survives a resume."""
    sums: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    tokens = busy_seconds = 0.0
    for receipt in receipts.values():
        sums.update(receipt.stats)
        reasons.update(receipt.reasons)
        if receipt.note and receipt.note.busy_seconds:
            tokens += receipt.stats.get("tokens", 0)
            busy_seconds += receipt.note.busy_seconds
    out: dict[str, Any] = {
        "rows": sum(r.num_rows for r in receipts.values()),
        "quarantined": sum(r.num_quarantined for r in receipts.values()),
        "reasons": dict(reasons),
        **{key: value for key, value in sorted(sums.items())},
    }
    if busy_seconds:
        out["tokens_per_second"] = round(tokens / busy_seconds, 1)
    return out


def _record(context: Context, stage: StageDirectory, outcome: Outcome) -> None:
    facts: dict[str, Any] = {"stage": stage.stage, "shard": outcome.index}
    if outcome.receipt:
        context.run.event(
            "shard",
            **facts,
            rows=outcome.receipt.num_rows,
            quarantined=outcome.receipt.num_quarantined,
            **outcome.receipt.stats,
            **({"busy_seconds": outcome.receipt.note.busy_seconds} if outcome.receipt.note else {}),
        )
    else:
        context.run.event("shard-failed", **facts, error=str(outcome.error or outcome.traceback))


def _after_unseen(limits: LimitsConfig, stage: StageDirectory, unseen: list[int], failures: Counter[int]) -> None:
    """A worker committed a shard that this process cannot see: say so instead of making it for ever."""
    failures.update(unseen)
    if any(failures[index] >= limits.max_consecutive_failures for index in unseen):
        raise EnvironmentFault(
            f"Workers committed shards of {stage.stage} that are not to be seen here, {unseen[:3]} among them.",
            str(stage.path),
            "run.root and run.store must be on storage that every node sees.",
        )


def _after_failure(limits: LimitsConfig, stage: StageDirectory, outcome: Outcome, failures: Counter[int]) -> None:
    if outcome.error:
        raise outcome.error
    failures[outcome.index] += 1
    if failures[outcome.index] >= limits.max_consecutive_failures:
        last = outcome.traceback.strip().splitlines()[-1]
        raise EnvironmentFault(
            f"Shard {outcome.index} of {stage.stage} failed {failures[outcome.index]} times, last with: {last}.",
            str(stage.path),
            "The full traceback is in events.jsonl. Everything that was committed is kept; the same command continues.",
        )


def _note(receipts: dict[int, Receipt], fresh: float, unit: str, seconds: float) -> str:
    refused = sum(receipt.num_quarantined for receipt in receipts.values())
    return f"{fresh / max(seconds, 1e-9):,.0f} {unit}/s" + (f", {refused} quarantined" if refused else "")


def _check_limits(limits: LimitsConfig, stage: StageDirectory, receipts: dict[int, Receipt], *, final: bool) -> None:
    free = shutil.disk_usage(stage.path).free / 1e9
    if free < limits.min_free_disk_gb:
        raise EnvironmentFault(
            f"The disk has {free:.1f} GB left, less than limits.min_free_disk_gb = {limits.min_free_disk_gb}.",
            str(stage.path),
            "Free some space and run the same command again: it continues where it stopped.",
        )
    check_quarantine(limits, stage.stage, str(stage.path), receipts.values(), final=final)


def check_quarantine(limits: LimitsConfig, stage: str, where: str, receipts: Any, *, final: bool) -> None:
    """Stop when more than the allowed fraction was refused; before the end, only once 100 rows were seen.

    Raises:
        DataError: Names the fraction and the top reasons.
    """
    reasons: Counter[str] = Counter()
    kept = 0
    for receipt in receipts:
        reasons.update({reason: n for reason, n in receipt.reasons.items() if reason != Reason.DUPLICATE})
        kept += receipt.num_rows
    refused = reasons.total()
    seen = kept + refused
    if seen and refused / seen > limits.max_quarantine_fraction and (final or seen >= 100):
        top = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(3))
        raise DataError(
            f"{stage} refused {refused} of {seen} rows, a fraction above limits.max_quarantine_fraction = "
            f"{limits.max_quarantine_fraction}; top reasons: {top}.",
            where,
            "Read the quarantine files there, mend the input or raise the limit; what was committed is kept.",
        )
