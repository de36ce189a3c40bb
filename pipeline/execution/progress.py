"""Progress reports, also from other processes, and their display.

On a terminal `Meter` shows a live bar, elsewhere a plain line now and then. Work reports to a `ProgressReporter`: in
the process that made it, a report is shown at once; a copy that was pickled to another process writes to a small
temporary file, which the waiting process reads (`poll`). The file is written at most every half second; a full disk
does not stop the work.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.markup import escape

from pipeline.report.formatting import duration, visible

STAGE_WIDTH = len("tuned-features")  # of the column with the stages' names
SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_REPORTS = 0.5


@dataclass(frozen=True)
class Progress:
    """`done` of `total` units of one part of the work; a total of 0 is not known."""

    part: str = ""
    done: int = 0
    total: int = 0
    unit: str = "prompts"
    note: str = ""  # a rate or a loss


class ProgressReporter:
    """Reports progress; a pickled copy reports across the process border.

    Args:
        path: The file that pickled copies write to; both processes must see it.
        show: Called with each report, in the process that made the reporter; None shows nothing.
    """

    def __init__(self, path: Path | None = None, show: Callable[[Progress], None] | None = None):
        self.path, self._show = path, show
        self._now = self._shown = Progress()
        self._written = self._began = 0.0
        self._tokens = 0  # of this part

    def __reduce__(self) -> tuple[Any, ...]:
        return ProgressReporter, (self.path,)

    def begin(self, part: str, total: int, *, done: int = 0, unit: str = "prompts") -> None:
        """Start the next part."""
        self._now = Progress(part, done, total, unit)
        self._began, self._tokens = time.monotonic(), 0
        self._report(at_once=True)

    def advance(self, number: int = 1, tokens: int = 0) -> None:
        """Count further finished units of this part, and the tokens that they were made of."""
        self._tokens += tokens
        rate = self._tokens / max(time.monotonic() - self._began, 1e-9)
        note = f"{self._tokens:,} tokens, {rate:,.0f} tokens/s" if self._tokens else ""
        self.update(self._now.done + number, note)

    def update(self, done: int, note: str = "") -> None:
        """Set the finished units of this part."""
        self._now = replace(self._now, done=done, note=note)
        self._report(at_once=done == self._now.total)

    def report(self, **progress: Any) -> None:
        """Report what somebody else has counted: the fields of `Progress`."""
        self._now = Progress(**progress)
        self._report()

    def poll(self) -> None:
        """Show what a copy in another process has written since the last call."""
        now = self.read()
        if now is not None and now != self._shown and self._show:
            self._shown = now
            self._show(now)

    def read(self) -> Progress | None:
        """The last report of a copy in another process; None without one, or while it is being written."""
        try:
            return Progress(**json.loads(self.path.read_text(encoding="utf-8"))) if self.path else None
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        if self.path:
            self.path.unlink(missing_ok=True)

    def _report(self, at_once: bool = False) -> None:
        if self._show:
            self._show(self._now)
        elif self.path and (at_once or time.monotonic() - self._written >= SECONDS_BETWEEN_REPORTS):
            self._written = time.monotonic()
            with contextlib.suppress(OSError):
                self.path.write_text(json.dumps(asdict(self._now)), encoding="utf-8")


class Meter:
    """One stage's progress: done of total, a rate, quarantined rows, time left.

    Args:
        total: Units of work, finished ones included; 0 while unknown.
        done: Units that an earlier run finished.
    """

    def __init__(self, console: Console, name: str, total: int, *, done: int = 0, unit: str = "shards"):
        self.console, self.name, self.total, self.done, self.unit = console, name, total, done, unit
        self._started = self._last_line = time.monotonic()
        self._at_start = done
        self._part = ""
        self._bar = bars.Progress(
            bars.TextColumn(f"{{task.description:>{STAGE_WIDTH}}}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[note]}"),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task(name, total=total or None, completed=done, note="")

    def __enter__(self) -> Meter:
        if self.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._bar.stop()

    def show(self, now: Progress) -> None:
        """Show a report; rate and time left restart with each part."""
        if (now.part, now.unit) != (self._part, self.unit) or self.total != now.total:
            self._part, self.unit, self.total, self._at_start = now.part, now.unit, now.total, now.done
            self._started = time.monotonic()
            self._bar.reset(self._task, total=now.total or None, completed=now.done, note="")
        self.update(now.done, ", ".join(filter(None, (now.note, now.part))))

    def update(self, done: int, note: str = "") -> None:
        """Set the finished units; `note` is a rate or a loss."""
        self.done = done
        if self.console.is_terminal:
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


def print_stage(console: Console, mark: str, stage: str, text: str) -> None:
    """Print a line about a stage: a mark, in rich's markup, its name, and a text as it is."""
    told = escape(visible(f"{stage:<{STAGE_WIDTH}} {text}"))
    console.print(f"{mark} {told}", highlight=False, soft_wrap=True)
