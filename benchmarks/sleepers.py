"""Stage workers of the scheduling benchmark that sleep for a millisecond per shard.

Ray workers import this module, so it imports nothing heavy.
"""

from __future__ import annotations

import time
from dataclasses import replace

from pipeline.artifacts.seed_rows import SEEDS
from pipeline.execution.progress import ShardProgress
from pipeline.storage.receipts import Receipt
from pipeline.storage.shards import ShardTask, ShardWriter, task_rows

SLEEP_SECONDS = 0.001


class Sleeper:
    """A stage worker that sleeps for a millisecond per shard and returns an empty receipt."""

    def __call__(self, task: ShardTask) -> Receipt:
        time.sleep(SLEEP_SECONDS)
        return Receipt(
            task.index, task.fingerprint, task.upstream, 1, 0, "", "", stats={"busy": SLEEP_SECONDS}
        )


class Copier:
    """A stage worker that sleeps and commits a copy of the shard; the receipt has its seconds."""

    def __init__(self, progress: ShardProgress):
        self.progress = progress

    def __call__(self, task: ShardTask) -> Receipt:
        started = time.perf_counter()
        time.sleep(SLEEP_SECONDS)
        rows = task_rows(task)
        self.progress.begin(task)
        with ShardWriter(task, SEEDS) as writer:
            writer.write(rows)
            self.progress.update(task, len(rows), 0)
            receipt = writer.commit("copy", [row["id"] for row in rows])
        return replace(receipt, stats={"busy": time.perf_counter() - started})
