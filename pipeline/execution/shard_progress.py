"""What workers have done of shards that are not committed yet: conversations, and tokens or positions.

Workers count into a `ShardProgress`. In the process that made it a count is shown at once; a copy that was pickled to
a worker writes one small file per shard, which the driver reads while it waits (`poll`). A file is written half a
second after a count, goes with its shard, and a full disk does not stop the work.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.execution.progress import SECONDS_BETWEEN_REPORTS
from pipeline.storage.tasks import ShardTask


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
        self._unwritten: set[int] = set()
        self._lock = threading.Lock()
        self._polled = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardProgress, (self.folder,)

    def begin(self, task: ShardTask) -> None:
        """Nothing of this shard is done; a trial of single rows is not counted."""
        if task.rows is None:
            self._done[task.index] = Done()
            self._report(task.index)

    def add(self, task: ShardTask, conversations: int, amount: int) -> None:
        """Count what was done of a shard that has begun."""
        if task.rows is None and task.index in self._done:
            done = self._done[task.index]
            done.conversations, done.amount = done.conversations + conversations, done.amount + amount
            self._report(task.index)

    def end(self, task: ShardTask) -> None:
        """A worker has nothing more to say of the shard; its file is the driver's to remove."""
        if not self._show:
            with self._lock:
                self._done.pop(task.index, None)

    def drop(self, task: ShardTask) -> None:
        """The shard is committed, or has to be begun again."""
        self._done.pop(task.index, None)
        if self.folder:
            with contextlib.suppress(OSError):
                self._file(task.index).unlink(missing_ok=True)

    def poll(self) -> None:
        """Show what copies in other processes have written; they write no more often than they are asked."""
        if time.monotonic() - self._polled < SECONDS_BETWEEN_REPORTS:
            return
        self._polled = time.monotonic()
        for index, done in self._read():
            self._done[index] = done
        if self._show:
            self._show()

    def total(self) -> Done:
        """Over all shards that have begun and are neither committed nor given up."""
        under_way = self._done.values()
        return Done(sum(done.conversations for done in under_way), sum(done.amount for done in under_way))

    @property
    def begun(self) -> bool:
        return bool(self._done)

    def close(self) -> None:
        """Remove what dead workers have left."""
        for path in self._files():
            path.unlink(missing_ok=True)

    def _report(self, index: int) -> None:
        if self._show:
            self._show()
        elif self.folder:
            with self._lock:
                first, self._unwritten = not self._unwritten, self._unwritten | {index}
            if first:
                timer = threading.Timer(SECONDS_BETWEEN_REPORTS, self._write)
                timer.daemon = True
                timer.start()

    def _write(self) -> None:
        assert self.folder is not None
        with self._lock, contextlib.suppress(OSError):
            under_way = {index: self._done[index] for index in self._unwritten if index in self._done}
            self._unwritten = set()
            self.folder.mkdir(parents=True, exist_ok=True)
            for index, done in under_way.items():
                self._file(index).write_text(json.dumps([done.conversations, done.amount]), encoding="ascii")

    def _file(self, index: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{index:05d}.progress.tmp"

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*.progress.tmp")) if self.folder else []

    def _read(self) -> Iterator[tuple[int, Done]]:
        """What the files say; one that is being written says what it said before."""
        for path in self._files():
            with contextlib.suppress(OSError, ValueError, TypeError):
                conversations, amount = json.loads(path.read_text(encoding="ascii"))
                yield int(path.name.partition(".")[0]), Done(int(conversations), int(amount))
