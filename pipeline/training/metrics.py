"""Where training's figures go: metrics.jsonl, one line per step, and the trackers; a resume repeats
no step.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.storage.atomic import write_text
from pipeline.training.trackers import Trackers, Watched

FILE = "metrics.jsonl"


class MetricsLog:
    """Appends to a training directory's logs; a context.

    Args:
        watched: The training; its directory has the logs.
        step: The step that training resumes from; lines of later steps are dropped, as they will be
            written again. They go by a rename, so that a worker that outlived its driver cannot
            append to the new file.
        report_to: The trackers that are told of each step, too.
    """

    def __init__(self, watched: Watched, step: int, report_to: Sequence[str] = ()):
        directory, before = watched.directory, list(read_metrics(watched.directory))
        kept = [line for line in before if line["step"] <= step] if step else []
        write_text(directory / FILE, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = (directory / FILE).open("a", encoding="utf-8")
        self.trackers = Trackers(
            report_to, watched, max((line["step"] for line in before), default=-1)
        )

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.trackers.finish()

    def write(self, step: int, figures: dict[str, Any]) -> None:
        """One step's figures: numbers, lists with an entry per head, and dictionaries of these."""
        self._file.write(json.dumps({"step": step, **figures}, allow_nan=False) + "\n")
        self._file.flush()
        self.trackers.log(step, figures)

    def conclude(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Tell the trackers the final figures; returns warnings of those that were given up, for
        the summary.
        """
        self.trackers.finish(figures)
        return {"warnings": list(self.trackers.failed.values())} if self.trackers.failed else {}


def read_metrics(directory: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl; those that a kill cut short, or that are damaged, are left
    out.
    """
    path = directory / FILE
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, RecursionError):
            figures = json.loads(line)
            if isinstance(figures, dict) and isinstance(figures.get("step"), int):
                yield figures


def read_curves(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The training's curve and the held-out one, as the report draws them.

    Rows of step and head_losses; the held-out ones with head_top1 and, of Medusa-2, the `kl` to the
    original.
    """
    lines = list(read_metrics(directory))
    trained = [line for line in lines if "loss" in line]
    held_out = [
        {
            "step": line["step"],
            "head_losses": [head["loss"] for head in line["held_out"]],
            "head_top1": [head.get("top1") for head in line["held_out"]],
            **({"kl": drift.get("kl")} if (drift := line.get("drift")) else {}),
        }
        for line in lines
        if line.get("held_out")
    ]
    return trained, held_out
