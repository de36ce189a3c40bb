"""Report a stage's progress, also from worker processes, and display it.

`Meter` shows a live bar on a terminal, or a spinner while the end is unknown; elsewhere it prints a
line every 15 seconds at most. In the process that created a `ProgressReporter` or a
`ShardProgress`, a report is shown at once. A copy that was pickled to another process writes a
`ProgressFile`, which the waiting process reads in `poll`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import progress as bars
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.text import Text

from pipeline.formatting import duration, visible
from pipeline.storage.progress_file import ProgressFile
from pipeline.storage.shards import ShardTask

STAGE_WIDTH = len("tuned-features")  # characters of the column with stage names
SECONDS_BETWEEN_LINES = 15.0
SECONDS_OF_RATE = 600.0  # the window from which the remaining time is estimated
SUFFIX = ".progress.tmp"  # of a progress file's name, one file per running shard
NOWHERE = Path(os.devnull, "none")  # no such folder: ProgressFile ignores the failed writes


@dataclass(frozen=True)
class Progress:
    """Progress of one part of a stage; a total of 0 is unknown."""

    part: str = ""
    done: int = 0
    total: int = 0
    unit: str = "prompts"
    note: str = ""  # a rate or a loss

    @property
    def count(self) -> str:
        """The number of finished units in words; empty if nothing is known yet."""
        if self.total:
            return f"{self.done} of {self.total} {self.unit}"
        return f"{self.done} {self.unit}" if self.done else ""


class ProgressReporter:
    """Reporter of a function's progress; a pickled copy reports from another process.

    Args:
        path: The file that pickled copies write to; both processes must see it.
        show: Called with each report, in the process that made the reporter. Without it, reports
            are written to `path`.
    """

    def __init__(self, path: Path = NOWHERE, show: Callable[[Progress], None] | None = None):
        self.path, self._show = path, show
        self._file = ProgressFile(path)
        self._now = Progress()
        self._began = 0.0
        self._tokens = 0  # generated tokens of this part

    def __reduce__(self) -> tuple[Any, ...]:
        return ProgressReporter, (self.path,)

    def begin(self, part: str, total: int, *, done: int = 0, unit: str = "prompts") -> None:
        """Report that a part of a stage begins, of which `done` of `total` units are finished."""
        self._now = Progress(part, done, total, unit)
        self._began, self._tokens = time.monotonic(), 0
        self._report(at_once=True)

    def advance(self, number: int = 1, tokens: int = 0) -> None:
        """Add finished units, and the tokens generated for them, to the current part."""
        self._tokens += tokens
        note = ""
        if self._tokens:
            rate = self._tokens / max(time.monotonic() - self._began, 1e-9)
            note = f"{self._tokens:,} tokens, {rate:,.0f} tokens/s"
        self.update(self._now.done + number, note)

    def update(self, done: int, note: str = "") -> None:
        """Set the number of finished units of the current part, and the note, and report them."""
        self._now = replace(self._now, done=done, note=note)
        self._report(at_once=done == self._now.total)

    def report(self, **progress: Any) -> None:
        """Report progress that the caller has counted, given as the fields of `Progress`."""
        self._now = Progress(**progress)
        self._report()

    def poll(self) -> None:
        """Show the last progress that a copy of this reporter in another process has written."""
        report = self._file.read()
        if self._show and report is not None:
            self._show(Progress(**report))

    def close(self) -> None:
        """Delete the file through which another process reports."""
        self._file.remove()

    def _report(self, at_once: bool = False) -> None:
        """Show the progress, or write it to the file that the other process reads."""
        if self._show:
            self._show(self._now)
        else:
            self._file.write(asdict(self._now), at_once=at_once)


SILENT = ProgressReporter()  # shows nothing


class ShardProgress:
    """Counts of finished conversations, and of tokens or positions, in shards not committed yet.

    Args:
        folder: Where pickled copies write, one file per shard; both processes must see it.
        show: Called after each count, in the process that made this object. Without it, counts are
            written to `folder`.
    """

    def __init__(self, folder: Path = NOWHERE, show: Callable[[], None] | None = None):
        self.folder, self._show = folder, show
        self._done: dict[int, Counter[str]] = {}
        self._files: dict[int, ProgressFile] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardProgress, (self.folder,)

    def begin(self, task: ShardTask) -> None:
        """Set the progress of a shard on a worker to zero.

        Attempts at some of its rows, which look for a crashing row, are not counted.
        """
        if task.rows is None:
            self._done[task.index] = Counter()
            self._report(task.index, at_once=True)

    def add(self, task: ShardTask, conversations: int, amount: int) -> None:
        """Add finished conversations, and tokens or positions, to a shard's progress."""
        if task.index in self._done and task.rows is None:
            self._done[task.index].update(conversations=conversations, amount=amount)
            self._report(task.index)

    def drop(self, task: ShardTask) -> None:
        """Delete the progress of a shard that is committed or has failed."""
        self._done.pop(task.index, None)
        self._file(task.index).remove()

    def poll(self) -> None:
        """Read the progress that copies in worker processes wrote, and show it."""
        for path in self.folder.glob(f"*{SUFFIX}"):
            report = ProgressFile(path).read()
            if report is not None:
                self._done[int(path.name.removesuffix(SUFFIX))] = Counter(report)
        if self._show:
            self._show()

    def total(self) -> Counter[str]:
        """Return the sum of all shards' progress: counts of `conversations` and `amount`."""
        return sum(self._done.values(), Counter())

    @property
    def begun(self) -> bool:
        """Whether a worker has reported progress of a shard that is not committed yet."""
        return bool(self._done)

    def close(self) -> None:
        """Delete the progress files of all shards, which dead workers may have left behind."""
        for path in self.folder.glob(f"*{SUFFIX}"):
            path.unlink(missing_ok=True)

    def _report(self, index: int, at_once: bool = False) -> None:
        """Show a shard's progress, or write it to the file that the other process reads."""
        if self._show:
            self._show()
        else:
            self._file(index).write(self._done[index], at_once=at_once)

    def _file(self, index: int) -> ProgressFile:
        """Return the file of a shard's progress."""
        return self._files.setdefault(index, ProgressFile(self.folder / f"{index:05d}{SUFFIX}"))


def with_progress(arguments: dict[str, object], progress: object) -> dict[str, object]:
    """Return a function's arguments with `progress` added, unless it is None."""
    if progress is None:
        return arguments
    return {**arguments, "progress": progress}


class BarOrSpinner(bars.ProgressColumn):
    """A column of the live display: a bar, or a spinner while the total is unknown."""

    def __init__(self) -> None:
        super().__init__()
        self._bar, self._spinner = bars.BarColumn(), bars.SpinnerColumn()

    def render(self, task: bars.Task) -> RenderableType:
        """Render the bar or spinner of a task."""
        if task.total is None:
            return self._spinner.render(task)
        return self._bar.render(task)


class TimeLeft(bars.ProgressColumn):
    """A column of the live display: the estimated time left; empty without an estimate."""

    max_refresh = 0.5

    def render(self, task: bars.Task) -> Text:
        """Render the time left of a task."""
        return Text(time_left(task))


def time_left(task: bars.Task) -> str:
    """Format the estimated time left of a task; empty without an estimate and at the end."""
    return f"{duration(task.time_remaining)} left" if task.time_remaining else ""


class Meter:
    """The display of a stage's progress: a live bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, name: str):
        self.console, self.name = console, name
        self._part: tuple[str, str, int] | None = None
        self._last_line = time.monotonic()
        self._bar = bars.Progress(
            bars.TextColumn(f"{{task.description:>{STAGE_WIDTH}}}"),
            BarOrSpinner(),
            bars.TextColumn("{task.fields[text]}"),
            bars.TimeElapsedColumn(),
            TimeLeft(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            get_time=time.monotonic,
            speed_estimate_period=SECONDS_OF_RATE,
        )
        self._task = self._add_task(Progress())

    def _add_task(self, now: Progress) -> bars.TaskID:
        """Add the part of a stage that begins to the live display."""
        text = _joined(now.count, now.note, now.part)
        total = now.total or None
        return self._bar.add_task(self.name, total=total, completed=now.done, text=text)

    def __enter__(self) -> Meter:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, now: Progress) -> None:
        """Update a terminal's bar, or else print a line if the last one is 15 seconds old."""
        part = (now.part, now.unit, now.total)
        if part != self._part:
            self._part = part
            self._bar.remove_task(self._task)  # a reset would keep the total where none is known
            self._task = self._add_task(now)
        else:
            text = _joined(now.count, now.note, now.part)
            self._bar.update(self._task, completed=now.done, text=text)
        moment = time.monotonic()
        if not self.console.is_terminal and moment - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = moment
            left = time_left(self._bar.tasks[0])
            line = f"{self.name}: {_joined(now.count, left, now.note, now.part)}"
            self.console.print(line, highlight=False, soft_wrap=True)


def _joined(*texts: str) -> str:
    """Join those texts about a stage's progress that are not empty."""
    return ", ".join(filter(None, texts))


def print_stage(console: Console, mark: str, stage: str, text: str, style: str = "") -> None:
    """Print a line about an executed stage, aligned with its progress bar.

    The mark is in rich's markup; name and text are literal. The style is that of the whole line.
    """
    line = escape(visible(f"{stage:<{STAGE_WIDTH}} {text}"))
    console.print(f"{mark} {line}", style=style, highlight=False, soft_wrap=True)
