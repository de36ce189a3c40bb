"""Find the rows of a shard that kill their worker, by bisection, so that these rows alone are
quarantined.

A shard that ended its worker's process several times is tried once more by itself, then in halves,
the halves that die in halves again, down to single rows. A row is given up only when it has killed
its worker alone as often as the limit says: the loss of a machine, or memory that runs out over
many rows, blames no row.
"""

from __future__ import annotations

import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from pipeline.errors import EnvironmentFault
from pipeline.execution.shard_worker import Outcome
from pipeline.storage.shards import read_rows
from pipeline.storage.stage_directory import StageDirectory
from pipeline.storage.tasks import ShardTask


def find_crashing_rows(
    map_tasks: Callable[..., Iterator[Outcome]],
    died: Outcome,
    stage: StageDirectory,
    max_deaths: int,
) -> dict[str, str]:
    """Return the ids of the rows of `died.task` that kill a worker alone, and how, including those
    known before.

    `map_tasks` is an executor's `map` that lacks only the tasks.
    Nothing new is found where the shard succeeds when it is tried alone.

    Raises:
        EnvironmentFault: The shard's rows kill the worker together, but none alone.
    """
    ids = [row["id"] for row in read_rows(died.task.source, ["id"])]
    scratch = stage.path / "isolation"
    trials = deque([_trial(died.task, 0, len(ids), len(ids), scratch)])
    deaths: Counter[str] = Counter()
    crashing: dict[str, str] = {}
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
                trials.append(_trial(died.task, start, middle, len(ids), scratch))
                trials.append(_trial(died.task, middle, stop, len(ids), scratch))
                continue
            name = ids[start]
            deaths[name] += 1
            if deaths[name] < max_deaths:
                trials.append(outcome.task)
            else:
                crashing[name] = (
                    f"alone it ended its worker {max_deaths} times, last: {outcome.death}"
                )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not crashing and not survived:
        raise EnvironmentFault(
            f"Shard {died.task.index} of {stage.stage} ends its worker each time, and none of its"
            f" rows does alone: {died.death.splitlines()[0].rstrip('.')}.",
            str(stage.path),
            "If memory runs out, use smaller batches or shards. What was committed is kept; run it"
            " again.",
        )
    return {**died.task.poison, **crashing}


def _trial(task: ShardTask, start: int, stop: int, num_rows: int, scratch: Path) -> ShardTask:
    """A task of some of the rows, with a shard of its own that is thrown away."""
    place = scratch / f"{task.index:05d}-{start}-{stop}"
    return replace(
        task,
        rows=(start, stop),
        share=(stop - start) / max(1, num_rows),
        shard=str(place / "shards" / "trial.parquet"),
        quarantine=str(place / "quarantine" / "trial.jsonl"),
    )
