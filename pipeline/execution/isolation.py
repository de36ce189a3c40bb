"""Which rows of a shard kill their worker: found by bisection, so that one bad row costs itself and nothing else.

A shard that ended its worker's process several times is tried in halves, the halves that die in halves again, down to
single rows. A row is given up only when it died alone as often as the limit says: a machine that goes away, or memory
that runs out over many rows, accuses nobody.
"""

from __future__ import annotations

import shutil
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.errors import EnvironmentFault
from pipeline.execution.executor import Executor, Outcome, ShardWorker
from pipeline.execution.placement import Placement
from pipeline.storage.shards import read_rows
from pipeline.storage.stage_directory import StageDirectory
from pipeline.storage.tasks import ShardTask


def find_poison(
    executor: Executor,
    worker: Callable[..., ShardWorker],
    arguments: dict[str, Any],
    died: Outcome,
    placement: Placement,
    *,
    stage: StageDirectory,
    max_deaths: int,
    seconds_per_task: float,
) -> dict[str, str]:
    """The ids of the rows of `died.task` that kill a worker each by itself, and how; what was known before included.

    Raises:
        EnvironmentFault: The shard's rows kill it together, and none does alone.
    """
    ids = [row["id"] for row in read_rows(died.task.source, ["id"])]
    scratch = stage.path / "isolation"
    trials = deque(_halves(died.task, (0, len(ids)), scratch))
    deaths: Counter[str] = Counter()
    poison: dict[str, str] = {}
    try:
        for outcome in executor.map(worker, arguments, trials, placement, seconds_per_task):
            if not outcome.death:
                continue
            assert outcome.task.rows is not None, "a trial is of some rows"
            start, stop = outcome.task.rows
            if stop - start > 1:
                trials.extend(_halves(died.task, (start, stop), scratch))
                continue
            deaths[ids[start]] += 1
            if deaths[ids[start]] < max_deaths:
                trials.append(outcome.task)
            else:
                poison[ids[start]] = f"alone it ended its worker {max_deaths} times, last: {outcome.death}"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not poison:
        raise EnvironmentFault(
            f"Shard {died.task.index} of {stage.stage} ends its worker each time, and none of its rows does alone: "
            f"{died.death.splitlines()[0].rstrip('.')}.",
            str(stage.path),
            "If memory runs out, use smaller batches or shards. What was committed is kept; run it again.",
        )
    return died.task.poison | poison


def _halves(task: ShardTask, rows: tuple[int, int], scratch: Path) -> list[ShardTask]:
    """Trials of both halves of some rows, each with a shard of its own that nobody will read."""
    start, stop = rows
    middle = (start + stop + 1) // 2
    return [
        replace(
            task,
            rows=half,
            shard=str(scratch / f"{task.index:05d}-{half[0]}-{half[1]}" / "shards" / "trial.parquet"),
            quarantine=str(scratch / f"{task.index:05d}-{half[0]}-{half[1]}" / "quarantine" / "trial.jsonl"),
        )
        for half in ((start, middle), (middle, stop))
        if half[0] < half[1]
    ]
