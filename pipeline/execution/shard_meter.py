"""The progress bar of a sharded stage."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pipeline.execution.progress import Meter, Progress, ShardProgress
from pipeline.execution.shard_worker import Outcome
from pipeline.storage.receipts import Receipt, StageTotals
from pipeline.storage.stage_directory import StageDirectory


class ShardMeter:
    """Progress bar of a sharded stage: conversations, token rate, shards and quarantined rows.

    Args:
        sizes: The number of conversations of each shard, by index.
        have: The receipts of shards that were committed before, by index.
    """

    def __init__(
        self,
        meter: Meter,
        stage: StageDirectory,
        sizes: Mapping[int, int],
        have: Mapping[int, Receipt],
    ):
        self.progress = ShardProgress(stage.path.absolute() / "attempts", self._show)
        self.totals = StageTotals(have.values())
        self._meter, self._sizes = meter, sizes
        self._done = sum(sizes[index] for index in have)
        self._before = self.totals.stats["tokens"]
        self._started: float | None = None  # when the first worker had loaded its model

    def count(self, outcome: Outcome) -> None:
        """Add a committed shard to the progress bar, or discard a failed attempt's progress."""
        self.progress.drop(outcome.task)
        if outcome.receipt:
            self._done += self._sizes[outcome.task.index]
            self.totals.add(outcome.receipt)
        self._show()

    def close(self) -> None:
        """Delete the files with the shards' progress."""
        self.progress.close()

    def _show(self) -> None:
        """Show the stage's progress: conversations, shards, token rate and quarantined rows."""
        now = self.progress.total()
        if self._started is None and self.progress.begun:
            self._started = time.monotonic()
        note = f"{self.totals.shards} of {len(self._sizes)} shards"
        if self._started is not None:
            made = self.totals.stats["tokens"] - self._before + now["amount"]
            seconds = max(time.monotonic() - self._started, 1e-9)
            note += f", {made / seconds:,.0f} tokens/s"
        if self.totals.quarantined:
            note += f", {self.totals.quarantined} quarantined"
        done, total = self._done + now["conversations"], sum(self._sizes.values())
        self._meter.show(Progress("", done, total, "conversations", note))
