"""Run a stage's worker on a shard, and find rows that crash the worker.

A worker is a plain class: its constructor loads the model, its call takes a `ShardTask` and the
next one, commits the shard itself and returns the receipt. It does not depend on Ray.

A shard that ended its worker's process several times is tried once more by itself, then bisected
down to single rows (`find_crashing_rows`). A row is quarantined only after it has killed its worker
alone `max_deaths` times, so no row is blamed for a lost machine or for memory that many rows
exhaust together.
"""

from __future__ import annotations

import shutil
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from pipeline.errors import EnvironmentFault, MedusaDistillError
from pipeline.storage.atomic import disk_errors
from pipeline.storage.receipts import Receipt
from pipeline.storage.shards import ShardTask, read_rows
from pipeline.storage.stage_directory import StageDirectory

# Commits the shard of its first task. The second task is the worker's next one, which it may begin;
# None if there is none.
ShardWorker: TypeAlias = Callable[[ShardTask, ShardTask | None], Receipt]


@dataclass(frozen=True)
class Outcome:
    """The result of a worker's attempt at a shard; exactly one field besides `task` is set.

    Attributes:
        receipt: The receipt of the committed shard.
        error: A MedusaDistillError that the worker raised.
        traceback: The traceback of any other exception.
        death: How the worker's process ended, if it died.
    """

    task: ShardTask
    receipt: Receipt | None = None
    error: MedusaDistillError | None = None
    traceback: str = ""
    death: str = ""


class LazyWorker:
    """A wrapper that makes a stage's worker at the first shard and returns errors as outcomes."""

    def __init__(self, worker: Callable[..., ShardWorker], arguments: dict[str, object]):
        self._make, self._arguments = worker, arguments
        self._worker: ShardWorker | None = None

    def run(self, task: ShardTask, upcoming: ShardTask | None = None) -> Outcome:
        """Run the stage's worker on a shard; return a receipt, error or traceback as the outcome.

        `upcoming` is the task that the worker will get next. A trial of single rows runs alone.
        """
        if task.rows is not None:
            upcoming = None
        try:
            with disk_errors(task.shard):
                if self._worker is None:
                    self._worker = self._make(**self._arguments)
                return Outcome(task, receipt=self._worker(task, upcoming))
        except MedusaDistillError as error:
            return Outcome(task, error=error)
        except Exception:
            failure = traceback.format_exc()
            self.close()  # its state is unknown: the next shard gets a new one
            return Outcome(task, traceback=failure)

    def close(self) -> None:
        """Close the worker, so that its engine releases memory; the next shard gets a new one."""
        close = getattr(self._worker, "close", None)
        if close:
            close()
        self._worker = None


def find_crashing_rows(
    map_tasks: Callable[..., Iterator[Outcome]],
    died: Outcome,
    stage: StageDirectory,
    max_deaths: int,
) -> dict[str, str]:
    """Find the rows of a shard that crash the worker, by bisection.

    The shard is first tried as a whole, without another shard in the process. If the worker
    survives that, no row is found.

    Args:
        map_tasks: An executor's `map` with all arguments but the tasks bound.
        died: The outcome of the shard's last attempt.
        max_deaths: A row counts as crashing once it has ended its worker this many times alone.

    Returns:
        How each crashing row ended its worker, by row id, including the rows that were known
        before.

    Raises:
        EnvironmentFault: The shard's rows end the worker together, but none does alone.
    """
    ids = [row["id"] for row in read_rows(died.task.source, ["id"])]
    scratch = stage.path / "isolation"
    trials = deque([_trial(died.task, 0, len(ids), scratch)])
    deaths: Counter[str] = Counter()
    crashing = {}
    survived = False
    try:
        for outcome in map_tasks(trials):
            assert outcome.task.rows is not None, "a trial is of some rows"
            start, stop = outcome.task.rows
            if not outcome.death:
                survived |= stop - start == len(ids)
                continue
            if stop - start > 1:
                middle = (start + stop) // 2
                trials.append(_trial(died.task, start, middle, scratch))
                trials.append(_trial(died.task, middle, stop, scratch))
                continue
            name = ids[start]
            deaths[name] += 1
            if deaths[name] < max_deaths:
                trials.append(outcome.task)
            else:
                how = f"alone it ended its worker {max_deaths} times, last: {outcome.death}"
                crashing[name] = how
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not crashing and not survived:
        raise EnvironmentFault(
            f"Shard {died.task.index} of {stage.stage} ends its worker each time, and none of its"
            f" rows does alone: {died.death.splitlines()[0].rstrip('.')}.",
            stage.path,
            "If memory runs out, use smaller batches or shards. What was committed is kept; run it"
            " again.",
        )
    return {**died.task.crashing, **crashing}


def _trial(task: ShardTask, start: int, stop: int, scratch: Path) -> ShardTask:
    """Return a task that runs a worker on a shard's rows [start, stop) and writes to `scratch`."""
    place = scratch / f"{task.index:05d}-{start}-{stop}"
    return replace(
        task,
        rows=(start, stop),
        shard=place / "shards" / "trial.parquet",
        quarantine=place / "quarantine" / "trial.jsonl",
    )
