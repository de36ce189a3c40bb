"""Map a stage's worker over its pending shards, and retry shards that fail."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pipeline.errors import EnvironmentFault
from pipeline.execution.placement import Placement
from pipeline.execution.progress import Meter
from pipeline.execution.shard_meter import ShardMeter
from pipeline.execution.shard_worker import Outcome, ShardWorker, find_crashing_rows
from pipeline.run.context import Context
from pipeline.storage.atomic import require_free_disk
from pipeline.storage.receipts import StageTotals, Summary
from pipeline.storage.shards import ShardTask
from pipeline.storage.stage_directory import StageDirectory

MAX_FAILURES = 3  # of a shard, or of training; then the stage stops


def run_sharded(
    context: Context,
    stage: StageDirectory,
    upstream: StageDirectory,
    worker: Callable[..., ShardWorker],
    arguments: dict[str, Any],
    placement: Placement,
    split: str | None = None,
    train_samples: int = 1,
) -> Summary:
    """Map a stage's worker over the shards that the run lacks, and retry those that fail.

    The stage gets one shard per upstream shard; its other shards are deleted.

    Args:
        worker: A class whose instances take a `ShardTask` and return its `Receipt`.
        arguments: The arguments of its constructor, to which `progress` is added.
        split: The split whose rows the worker reads, to size the progress bar; None for all rows.
        train_samples: How many conversations the worker makes from a training row.

    Returns:
        Totals over all shards, see `StageTotals.summary`.

    Raises:
        MedusaDistillError: A worker raises it, a shard fails too often, too much was quarantined,
            or the disk is nearly full.
    """
    limits = context.config.limits
    most = limits.max_quarantine_fraction
    sources = upstream.receipts()
    tasks = stage.tasks(upstream, sources)
    have = stage.drop_shards_but(sources)
    pending = deque(stage.pending(tasks, have))
    for task in pending:
        have.pop(task.index, None)
    sizes = {}
    for index, receipt in sources.items():
        sizes[index] = int(receipt.stats[f"{split}_rows"]) if split else receipt.num_rows
        if train_samples > 1:
            sizes[index] += (train_samples - 1) * int(receipt.stats["train_rows"])
    failures = Failures(stage)
    with (
        Meter(context.console, stage.stage) as meter,
        contextlib.closing(ShardMeter(meter, stage, sizes, have)) as shown,
    ):
        map_tasks = functools.partial(
            context.executor.map,
            worker,
            arguments,
            placement=placement,
            progress=shown.progress,
        )
        while pending:
            killers = []
            for outcome in map_tasks(pending):
                _log_outcome(context, stage, outcome)
                shown.count(outcome)
                if outcome.receipt:
                    require_free_disk(stage.path, limits.min_free_disk_gb)
                    shown.totals.check_quarantine(stage.path, most, final=False)
                elif failures.may_retry(outcome):
                    pending.append(outcome.task)
                else:
                    killers.append(outcome)
            for killer in killers:
                context.console.print(
                    f"{stage.stage}: searching shard {killer.task.index} for crashing rows"
                )
                failures.find_crashing_rows_of(map_tasks, killer)
            left = stage.pending(tasks, stage.receipts())
            pending.extend(failures.remaining_tasks(left, killers))
    totals = StageTotals(stage.receipts().values())
    totals.check_quarantine(stage.path, most, final=True)
    return totals.summary()


class Failures:
    """Counts of each shard's failures in a run, and the rows that crash its worker."""

    def __init__(self, stage: StageDirectory):
        self.stage = stage
        self._times: Counter[int] = Counter()
        self._crashing: dict[int, dict[str, str]] = {}

    def may_retry(self, outcome: Outcome) -> bool:
        """Count a shard's failure; return whether to retry the shard unchanged.

        If False, the shard has failed MAX_FAILURES times, the last time by ending its process,
        and its rows are to be searched for those that crash a worker.

        Raises:
            MedusaDistillError: The worker raised it, or the shard failed MAX_FAILURES times, the
                last time without ending the worker's process.
        """
        if outcome.error:
            raise outcome.error
        index = outcome.task.index
        self._times[index] += 1
        if self._times[index] < MAX_FAILURES:
            return True
        if outcome.death:
            self._times[index] = 0
            return False
        last = outcome.traceback.strip().splitlines()[-1]
        raise EnvironmentFault(
            f"Shard {index} of {self.stage.stage} failed {MAX_FAILURES} times, last with: {last}.",
            self.stage.path,
            "The full traceback is in events.jsonl. Everything that was committed is kept; the same"
            " command continues.",
        )

    def find_crashing_rows_of(
        self, map_tasks: Callable[..., Iterator[Outcome]], killer: Outcome
    ) -> None:
        """Search a shard for rows that crash the worker, and remember them for `remaining_tasks`.

        Raises:
            EnvironmentFault: A repeated search finds the same rows as the last one, or all rows
                together end the worker and none does alone.
        """
        index = killer.task.index
        found = find_crashing_rows(map_tasks, killer, self.stage, MAX_FAILURES)
        if found == self._crashing.get(index):
            raise EnvironmentFault(
                f"Shard {index} of {self.stage.stage} ends its worker repeatedly, except when it is"
                f" tried alone: {killer.death.splitlines()[0].rstrip('.')}.",
                self.stage.path,
                "If memory runs out, use smaller batches or fewer workers. Committed shards are"
                " kept; run the same command again.",
            )
        self._crashing[index] = found

    def remaining_tasks(
        self, tasks: Sequence[ShardTask], killers: Sequence[Outcome]
    ) -> list[ShardTask]:
        """Return the tasks of missing shards, with the rows that crash a worker.

        If a missing shard was not searched, a worker has committed it to storage that this machine
        does not see. This counts as a failure.

        Args:
            tasks: The tasks of the shards that are missing after a pass over all tasks.
            killers: The outcomes whose shards were searched in this pass.

        Raises:
            EnvironmentFault: Such a shard has failed MAX_FAILURES times.
        """
        searched = {killer.task.index for killer in killers}
        for task in tasks:
            if task.index not in searched:
                self._times[task.index] += 1
                if self._times[task.index] >= MAX_FAILURES:
                    raise EnvironmentFault(
                        f"Workers committed shard {task.index} of {self.stage.stage}, but this"
                        " machine does not see it.",
                        self.stage.path,
                        "run.root and run.store must be on storage that every node sees.",
                    )
        return [replace(task, crashing=self._crashing.get(task.index, {})) for task in tasks]


def _log_outcome(context: Context, stage: StageDirectory, outcome: Outcome) -> None:
    """Log the outcome of a shard in the run's events.jsonl."""
    event = functools.partial(context.run.event, stage=stage.stage, shard=outcome.task.index)
    if outcome.receipt:
        event("shard")
    elif outcome.death:
        event("worker-died", error=outcome.death)
    else:
        event("shard-failed", error=str(outcome.error or outcome.traceback))
