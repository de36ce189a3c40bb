"""Workers make shards; what becomes of each is an outcome.

A worker is a plain class: its constructor loads the model, its call takes a `ShardTask`, commits
the shard itself and returns the receipt. It does not depend on Ray.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import MedusaDistillError
from pipeline.storage.atomic import disk_errors
from pipeline.storage.receipts import Receipt
from pipeline.storage.tasks import ShardTask


@dataclass(frozen=True)
class Outcome:
    """The result of one shard: a receipt, an error for the user, a worker's traceback, or how its
    process ended.
    """

    task: ShardTask
    receipt: Receipt | None = None
    error: MedusaDistillError | None = None
    traceback: str = ""
    death: str = ""


class ShardWorker(Protocol):
    """What a stage maps over its shards.

    If it has `expect(task | None)`, that is called before each shard with the one that follows.
    """

    def __call__(self, task: ShardTask) -> Receipt: ...


class LazyWorker:
    """Builds the worker on its first task, and turns every failure, its constructor's too, into an
    `Outcome`.
    """

    def __init__(self, worker: Callable[..., ShardWorker], arguments: dict[str, Any]):
        self._make, self._arguments = worker, arguments
        self._worker: ShardWorker | None = None

    def run(self, task: ShardTask, upcoming: ShardTask | None = None) -> Outcome:
        try:
            with disk_errors(Path(task.shard)):
                return Outcome(task, receipt=self._make_shard(task, upcoming))
        except MedusaDistillError as error:
            return Outcome(task, error=error)
        except Exception:
            failure = traceback.format_exc()
            self.close()  # its state is unknown: the next shard gets a new one
            return Outcome(task, traceback=failure)

    def _make_shard(self, task: ShardTask, upcoming: ShardTask | None) -> Receipt:
        if self._worker is None:
            self._worker = self._make(**self._arguments)
        if task.rows is not None:
            upcoming = None  # a trial of single rows runs alone
        expect = getattr(self._worker, "expect", None)
        if expect:
            expect(upcoming)
        return self._worker(task)

    def close(self) -> None:
        """Let the worker release what it holds: an engine's memory, which the next stage needs."""
        close = getattr(self._worker, "close", None)
        if close:
            close()
        self._worker = None
