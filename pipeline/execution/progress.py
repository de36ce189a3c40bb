"""Progress that fits where it is shown: a live bar on a terminal, a plain line now and then everywhere else."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SECONDS_BETWEEN_LINES = 15.0


class Meter:
    """One stage's progress: done of total, a rate in its own unit, rows refused, time left.

    Args:
        console: Where to show it.
        name: The stage.
        total: Units of work (shards, steps, prompts), what is already done included; 0 while it is unknown.
        done: Units that an earlier run committed.
        unit: What a unit is called.
    """

    def __init__(self, console: Console, name: str, total: int, *, done: int = 0, unit: str = "shards"):
        self.console, self.name, self.total, self.done, self.unit = console, name, total, done, unit
        self._started = self._last_line = time.monotonic()
        self._at_start = done
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Meter:
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description:>10}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.name, total=self.total or None, completed=self.done, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: int, note: str = "") -> None:
        """Say how far it is; `note` is a rate or a loss."""
        self.done = done
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=self.total or None, note=note)
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            far = f"{done} of {self.total} {self.unit}, {self._time_left()}" if self.total else f"{done} {self.unit}"
            self.console.print(f"{self.name}: {far}{', ' + note if note else ''}", highlight=False, soft_wrap=True)

    def advance(self, note: str = "") -> None:
        self.update(self.done + 1, note)

    def _time_left(self) -> str:
        finished = self.done - self._at_start
        if not finished:
            return "time left unknown"
        return duration((time.monotonic() - self._started) / finished * (self.total - self.done)) + " left"


def duration(seconds: float) -> str:
    """Seconds as a person says them: 7 s, 2 min 5 s, 3 h 20 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
