"""What workers have done of shards that are not committed yet: conversations, and tokens or
positions.

Workers count into a `ShardProgress`. In the process that made it a count is shown at once; a copy
that was pickled to a worker writes one small file per shard, which the driver reads while it waits
(`poll`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.storage.progress_file import SECONDS_BETWEEN_REPORTS, ProgressFile
from pipeline.storage.tasks import ShardTask

SUFFIX = ".progress.tmp"


@dataclass
class Done:
    """Conversations that are finished, and the tokens or positions that were made so far."""

    conversations: int = 0
    amount: int = 0


class ShardProgress:
    """The counts of shards under way, by shard.

    Args:
        folder: Where pickled copies write; both processes must see it. None: they write nothing.
        show: Called after each count, in the process that made this object.
    """

    def __init__(self, folder: Path | None = None, show: Callable[[], None] | None = None):
        self.folder, self._show = folder, show
        self._done: dict[int, Done] = {}
        self._files: dict[int, ProgressFile] = {}
        self._polled = -math.inf

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardProgress, (self.folder,)

    def begin(self, task: ShardTask) -> None:
        """Count this shard from nothing; a trial of single rows is not counted."""
        if task.rows is None:
            self._done[task.index] = Done()
            self._report(task.index, at_once=True)

    def add(self, task: ShardTask, conversations: int, amount: int) -> None:
        """Count what was done of a shard that has begun."""
        done = self._done.get(task.index)
        if done is not None and task.rows is None:
            done.conversations += conversations
            done.amount += amount
            self._report(task.index)

    def drop(self, task: ShardTask) -> None:
        """Forget a shard that is committed, or has to be begun again."""
        self._done.pop(task.index, None)
        if self.folder is not None:
            self._file(task.index).remove()

    def poll(self) -> None:
        """Show what copies in other processes have written; they write no more often than this
        reads.
        """
        now = time.monotonic()
        if self.folder is None or now - self._polled < SECONDS_BETWEEN_REPORTS:
            return
        self._polled = now
        for path in self.folder.glob(f"*{SUFFIX}"):
            report = ProgressFile(path).read()
            if report is not None:
                self._done[int(path.name.removesuffix(SUFFIX))] = Done(**report)
        if self._show:
            self._show()

    def total(self) -> Done:
        """Return the sum over all shards that have begun and were not dropped."""
        total = Done()
        for done in self._done.values():
            total.conversations += done.conversations
            total.amount += done.amount
        return total

    @property
    def begun(self) -> bool:
        return bool(self._done)

    def close(self) -> None:
        """Remove what dead workers have left."""
        if self.folder is not None:
            for path in self.folder.glob(f"*{SUFFIX}"):
                path.unlink(missing_ok=True)

    def _report(self, index: int, at_once: bool = False) -> None:
        if self._show:
            self._show()
        elif self.folder is not None:
            self._file(index).write(asdict(self._done[index]), at_once=at_once)

    def _file(self, index: int) -> ProgressFile:
        assert self.folder is not None
        path = self.folder / f"{index:05d}{SUFFIX}"
        return self._files.setdefault(index, ProgressFile(path))
