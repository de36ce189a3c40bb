"""The progress bar of a sharded stage."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.execution.progress import Meter, Progress, ShardProgress
from pipeline.execution.shard_worker import Outcome
from pipeline.storage.receipts import Receipt, StageTotals
from pipeline.storage.stage_directory import StageDirectory


class ShardMeter:
    """Progress bar of a sharded stage: conversations, tokens, shards and quarantined rows.

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
        folder = stage.path.absolute() / "attempts"
        folder.mkdir(parents=True, exist_ok=True)
        self.progress = ShardProgress(folder, self._show)
        self.totals = StageTotals(have.values())
        self._meter, self._sizes = meter, sizes
        self._done = sum(sizes[index] for index in have)
        self._before = self.totals.stats["tokens"]
        self._has_begun = False  # whether a worker has loaded its model
        self._tokens = 0
        self._tokens_per_conversation = 0.0  # as expected by the workers

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
        """Show the stage's progress: conversations, shards, tokens and quarantined rows."""
        begun = self.progress.begun
        self._has_begun = self._has_begun or bool(begun)
        if not self._has_begun:
            self._meter.show(Progress("waiting for a worker to load the target"))
            return
        now = self.progress.total()
        done, total = self._done + now["conversations"], sum(self._sizes.values())
        committed = self.totals.stats["tokens"] - self._before
        self._tokens = max(self._tokens, int(committed) + now["tokens"])
        num_begun = sum(self._sizes[index] for index in begun)
        if num_begun:
            expected = now["tokens"] + now["tokens_left"]
            self._tokens_per_conversation = expected / num_begun
        num_waiting = max(0, total - self._done - num_begun)
        left = now["tokens_left"] + round(num_waiting * self._tokens_per_conversation)
        note = f"{self.totals.shards} of {len(self._sizes)} shards"
        if self.totals.quarantined:
            note += f", {self.totals.quarantined} quarantined"
        self._meter.show(Progress("", done, total, "conversations", note, self._tokens, left))
