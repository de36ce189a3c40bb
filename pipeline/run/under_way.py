"""What is shown while a stage's workers make its shards: conversations, tokens, rate, shards,
quarantined rows.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping

from pipeline.execution.progress import Meter, Progress, ShardProgress
from pipeline.execution.shard_worker import Outcome
from pipeline.run.context import Context
from pipeline.storage.stage_directory import StageDirectory
from pipeline.storage.totals import StageTotals


class UnderWay:
    """A stage's shards as a meter shows them.

    Args:
        sizes: The conversations of each shard.
        unfinished: The shards that are still to be made.
        totals: Of the committed shards; those that are committed from here on are added.
        unit: The statistic of them that is shown beside the conversations.
    """

    def __init__(
        self,
        meter: Meter,
        stage: StageDirectory,
        sizes: Mapping[int, int],
        unfinished: Collection[int],
        totals: StageTotals,
        unit: str,
    ):
        self.progress = ShardProgress(stage.path.absolute() / "attempts", self._show)
        self._meter, self._sizes, self._totals, self._unit = meter, sizes, totals, unit
        self._committed = {index for index in sizes if index not in unfinished}
        self._before = totals.stats[unit]
        self._started: float | None = None  # when the first worker had loaded its model

    def outcome(self, outcome: Outcome) -> None:
        """A worker is done with a shard, or has failed: what it was doing is no longer under
        way.
        """
        self.progress.drop(outcome.task)
        if outcome.receipt:
            self._committed.add(outcome.task.index)
            self._totals.add(outcome.receipt)
        self._show()

    def _show(self) -> None:
        now = self.progress.total()
        if self._started is None and self.progress.begun:
            self._started = time.monotonic()
        made = self._totals.stats[self._unit] + now.amount
        parts = [f"{made:,.0f} {self._unit}"] if made else []
        if self._started is not None and made > self._before:
            seconds = time.monotonic() - self._started
            parts.append(f"{(made - self._before) / max(seconds, 1e-9):,.0f} {self._unit}/s")
        parts.append(f"{len(self._committed)} of {len(self._sizes)} shards")
        if self._totals.quarantined:
            parts.append(f"{self._totals.quarantined} quarantined")
        done = sum(self._sizes[index] for index in self._committed) + now.conversations
        total = sum(self._sizes.values())
        self._meter.show(Progress("", done, total, "conversations", ", ".join(parts)))


@contextlib.contextmanager
def under_way(
    context: Context,
    stage: StageDirectory,
    sizes: Mapping[int, int],
    unfinished: Collection[int],
    totals: StageTotals,
    unit: str,
) -> Iterator[UnderWay]:
    """Show a stage's shards until they are made; arguments as of `UnderWay`."""
    with Meter(context.console, stage.stage) as meter:
        shown = UnderWay(meter, stage, sizes, unfinished, totals, unit)
        try:
            yield shown
        finally:
            shown.progress.close()
