"""Progress reports, also from other processes, and their display.

On a terminal `Meter` shows a live bar, elsewhere a plain line now and then. Work reports to a
`ProgressReporter`: in the process that made it, a report is shown at once; a copy that was pickled
to another process writes to a `ProgressFile`, which the waiting process reads (`poll`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.markup import escape

from pipeline.formatting import duration, visible
from pipeline.storage.progress_file import ProgressFile

STAGE_WIDTH = len("tuned-features")  # of the column with the stages' names
SECONDS_BETWEEN_LINES = 15.0


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
        self._file = None if path is None else ProgressFile(path)
        self._now = Progress()
        self._began = 0.0
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
        note = ""
        if self._tokens:
            rate = self._tokens / max(time.monotonic() - self._began, 1e-9)
            note = f"{self._tokens:,} tokens, {rate:,.0f} tokens/s"
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
        """Show what a copy in another process has written last."""
        if self._file and self._show:
            report = self._file.read()
            if report is not None:
                self._show(Progress(**report))

    def close(self) -> None:
        if self._file:
            self._file.remove()

    def _report(self, at_once: bool = False) -> None:
        if self._show:
            self._show(self._now)
        elif self._file:
            self._file.write(asdict(self._now), at_once=at_once)


def with_progress(arguments: dict[str, Any], progress: object) -> dict[str, Any]:
    """Add `progress` to the arguments of a function that reports it; None adds nothing."""
    if progress is None:
        return arguments
    return {**arguments, "progress": progress}


class Meter:
    """Shows one stage's progress: done of total, a rate, time left. The time left restarts with
    each part.
    """

    def __init__(self, console: Console, name: str):
        self.console, self.name = console, name
        self._first = Progress()  # report of this part
        self._started = self._last_line = time.monotonic()
        self._bar = bars.Progress(
            bars.TextColumn(f"{{task.description:>{STAGE_WIDTH}}}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[note]}"),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=None, note="")

    def __enter__(self) -> Meter:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, now: Progress) -> None:
        first, moment = self._first, time.monotonic()
        if (now.part, now.unit, now.total) != (first.part, first.unit, first.total):
            self._first, self._started = now, moment
            self._bar.reset(self._task, total=now.total or None, note="")
        note = ", ".join(filter(None, [now.note, now.part]))
        self._bar.update(self._task, completed=now.done, note=note)
        if not self.console.is_terminal and moment - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = moment
            self.console.print(
                f"{self.name}: {self._line(now, note)}", highlight=False, soft_wrap=True
            )

    def _line(self, now: Progress, note: str) -> str:
        parts = [f"{now.done} {now.unit}"]
        if now.total:
            parts = [f"{now.done} of {now.total} {now.unit}", self._time_left(now)]
        if note:
            parts.append(note)
        return ", ".join(parts)

    def _time_left(self, now: Progress) -> str:
        finished = now.done - self._first.done
        if not finished:
            return "time left unknown"
        seconds_per_unit = (time.monotonic() - self._started) / finished
        return duration(seconds_per_unit * (now.total - now.done)) + " left"


def print_stage(console: Console, mark: str, stage: str, text: str) -> None:
    """Print a line about a stage: a mark, in rich's markup, its name, and a text as it is."""
    told = escape(visible(f"{stage:<{STAGE_WIDTH}} {text}"))
    console.print(f"{mark} {told}", highlight=False, soft_wrap=True)
