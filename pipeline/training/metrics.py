"""Where training's figures go: metrics.jsonl, one line per step, and TensorBoard; a resume repeats no step."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.storage.atomic import write_text

FILE = "metrics.jsonl"


class MetricsLog:
    """Appends to a training directory's logs; a context.

    Args:
        directory: The training directory.
        step: The step that training resumes from; lines of later steps are dropped, as they will be written again.
            They go by a rename, so that a worker that outlived its driver cannot append to the new file.
    """

    def __init__(self, directory: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        kept = [line for line in read_metrics(directory) if line["step"] <= step] if step else []
        write_text(directory / FILE, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = (directory / FILE).open("a", encoding="utf-8")
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1 if step else 0)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._board.close()

    def write(self, step: int, figures: dict[str, Any]) -> None:
        """One step's figures: numbers, lists with an entry per head, and dictionaries of these."""
        self._file.write(json.dumps({"step": step, **figures}, allow_nan=False) + "\n")
        self._file.flush()
        for name, number in _scalars(figures):
            self._board.add_scalar(name, number, step)


def read_metrics(directory: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl; those that a kill cut short, or that are damaged, are left out."""
    path = directory / FILE
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, RecursionError):
            figures = json.loads(line)
            if isinstance(figures, dict) and isinstance(figures.get("step"), int):
                yield figures


def read_curves(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The training's curve and the held-out one, as the report draws them.

    Rows of step and head_losses; the held-out ones with head_top1 and, of Medusa-2, the `kl` to the original.
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


def _scalars(figures: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Flat names and numbers: `held_out/head_2/top1`."""
    if isinstance(figures, dict):
        for key, value in figures.items():
            yield from _scalars(value, f"{name}/{key}" if name else key)
    elif isinstance(figures, list):
        for head, value in enumerate(figures):
            yield from _scalars(value, f"{name}/head_{head}")
    else:
        yield name, figures
