"""Report a stage's progress, also from worker processes, and display it.

`Meter` shows a live bar on a terminal, or a spinner while the end is unknown; elsewhere it prints a
line every 15 seconds at most, and none while nothing changes. In the process that created a
`ProgressReporter` or a `ShardProgress`, a report is shown at once. A copy that was pickled to
another process writes a `ProgressFile`, which the waiting process reads in `poll`.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.markup import escape

from pipeline.formatting import duration, rate, visible
from pipeline.storage.progress_file import ProgressFile
from pipeline.storage.shards import ShardTask

STAGE_WIDTH = len("tuned-features")  # characters of the column with stage names
SECONDS_BETWEEN_LINES = 15.0
SUFFIX = ".progress.tmp"  # of a progress file's name, one file per running shard
NOWHERE = Path(os.devnull, "none")  # no such folder: ProgressFile ignores the failed writes


@dataclass(frozen=True)
class Progress:
    """Progress of one part of a stage; a total of 0 is unknown.

    `tokens` includes the tokens of unfinished units. `tokens_left` is an estimate; without one it
    is 0, and the units give the time left.
    """

    part: str = ""
    done: int = 0
    total: int = 0
    unit: str = "prompts"
    note: str = ""  # such as a loss
    tokens: int = 0
    tokens_left: int = 0

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
        self._stop = path.with_name(f"stop-{path.name}")
        self._asked_to_stop = False
        self._now = Progress()

    def __reduce__(self) -> tuple[Any, ...]:
        return ProgressReporter, (self.path,)

    def begin(self, part: str, total: int, *, done: int = 0, unit: str = "prompts") -> None:
        """Report that a part of a stage begins, of which `done` of `total` units are finished."""
        self._now = Progress(part, done, total, unit)
        self._report(at_once=True)

    def advance(self, number: int = 1, tokens: int = 0) -> None:
        """Add finished units, and the tokens made for them, to the current part."""
        self.update(self._now.done + number, self._now.tokens + tokens)

    def update(self, done: int, tokens: int = 0, tokens_left: int = 0, note: str = "") -> None:
        """Set the counts of the current part, and the note, and report them."""
        self._now = replace(self._now, done=done, tokens=tokens, tokens_left=tokens_left, note=note)
        self._report(at_once=done == self._now.total)

    def report(self, **progress: Any) -> None:
        """Report progress that the caller has counted, given as the fields of `Progress`."""
        self._now = Progress(**progress)
        self._report()

    def poll(self) -> None:
        """Show the last progress that a copy of this reporter in another process has written."""
        report = self._file.read()
        if self._show and report is not None:
            self._now = Progress(**report)
            self._show(self._now)

    @property
    def has_begun(self) -> bool:
        """Whether any progress has been reported."""
        return self._now != Progress()

    def ask_to_stop(self) -> None:
        """Ask the function that reports to stop, also where it runs in another process."""
        self._asked_to_stop = True
        with contextlib.suppress(OSError):
            self._stop.touch()

    @property
    def asked_to_stop(self) -> bool:
        """Whether `ask_to_stop` was called on this reporter, or on the one that it is a copy of."""
        return self._asked_to_stop or self._stop.exists()

    def close(self) -> None:
        """Delete the files through which the two processes report and ask."""
        self._file.remove()
        ProgressFile(self._stop).remove()

    def _report(self, at_once: bool = False) -> None:
        """Show the progress, or write it to the file that the other process reads."""
        if self._show:
            self._show(self._now)
        else:
            self._file.write(asdict(self._now), at_once=at_once)


SILENT = ProgressReporter()  # shows nothing


class ShardProgress:
    """Counts of finished conversations and of tokens in shards that are not committed yet.

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
        """Set the progress of a shard on a worker to zero."""
        self._done[task.index] = Counter()
        self._report(task.index, at_once=True)

    def update(
        self, task: ShardTask, conversations: int, tokens: int, tokens_left: int = 0
    ) -> None:
        """Set a shard's finished conversations, its tokens, and how many tokens may be left."""
        self._done[task.index] = Counter(
            conversations=conversations, tokens=tokens, tokens_left=tokens_left
        )
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
        """Return the sum of all shards' progress, by the arguments of `update`."""
        return sum(self._done.values(), Counter())

    @property
    def begun(self) -> Collection[int]:
        """The indices of shards that a worker has begun and that are not committed yet."""
        return self._done.keys()

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


class Meter:
    """The display of a stage's progress: a live bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, name: str):
        self.console, self.name = console, name
        self._now = self._printed = Progress()
        self._last_line = time.monotonic()
        self._bar = bars.Progress(
            bars.TextColumn(f"{{task.description:>{STAGE_WIDTH}}}"),
            bars.BarColumn(),
            bars.TextColumn("{task.fields[text]}"),
            bars.TimeElapsedColumn(),
            bars.TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            get_time=time.monotonic,
            speed_estimate_period=math.inf,
        )
        self._begin_part()

    def _begin_part(self) -> None:
        """Replace the tasks of the live display by the current part's tasks: units and tokens."""
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        now = self._first = self._now
        total = now.total or None
        self._units = self._bar.add_task(
            self.name, completed=now.done, total=total, text="", left=""
        )
        self._tokens = self._bar.add_task("", completed=now.tokens, total=None, visible=False)

    def __enter__(self) -> Meter:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, now: Progress) -> None:
        """Update a terminal's bar, or else print a line if the last one is 15 seconds old.

        No line is printed twice.
        """
        before, self._now = self._now, now
        if (now.part, now.unit, now.total) != (before.part, before.unit, before.total):
            self._begin_part()
        self._bar.update(self._tokens, completed=now.tokens)
        self._bar.update(self._units, completed=self._completed())
        left, tokens = self._time_left(), self._token_rate()
        self._bar.update(
            self._units, text=_joined(now.count, tokens, now.note, now.part), left=left
        )
        if self.console.is_terminal or now == self._printed:
            return
        moment = time.monotonic()
        if moment - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = moment
            self._printed = now
            text = _joined(now.count, left, tokens, now.note, now.part)
            self.console.print(f"{self.name}: {text}", highlight=False, soft_wrap=True)

    def _completed(self) -> float:
        """Return the finished units, and a share of the unfinished ones by their tokens."""
        now, first = self._now, self._first
        if not now.tokens_left:
            return now.done
        share = now.tokens / (now.tokens + now.tokens_left)
        return max(now.done, first.done + share * (now.total - first.done))

    def _token_rate(self) -> str:
        """Format the part's tokens and their rate; empty without tokens."""
        if not self._now.tokens:
            return ""
        pace = self._bar.tasks[-1].speed
        text = f"{self._now.tokens:,} tokens"
        return f"{text}, {rate(pace)} tokens/s" if pace else text

    def _time_left(self) -> str:
        """Format the time left at the part's mean pace; empty without an estimate and at the end.

        Until the part finishes its first unit, expected tokens are the most that there can be.
        """
        seconds = self._bar.tasks[0].time_remaining
        if not seconds:
            return ""
        is_bound = self._now.tokens_left and self._now.done == self._first.done
        return f"{'at most ' if is_bound else ''}{duration(seconds)} left"


def _joined(*texts: str) -> str:
    """Join those texts about a stage's progress that are not empty."""
    return ", ".join(filter(None, texts))


def print_stage(console: Console, mark: str, stage: str, text: str, style: str = "") -> None:
    """Print a line about an executed stage, aligned with its progress bar.

    The mark is in rich's markup; name and text are literal. The style applies to the whole line.
    """
    line = escape(visible(f"{stage:<{STAGE_WIDTH}} {text}"))
    console.print(f"{mark} {line}", style=style, highlight=False, soft_wrap=True)
