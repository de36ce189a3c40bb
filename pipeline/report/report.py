"""A run's report on disk: report.json for programs, report.md and report.html for people; each file whole or not there.

`report` is the dictionary that report.json shows, `extras` what only the drawings need: `tree` {"choices",
"probabilities"}, `losses` and `held_out` (rows of {"step", "loss", "head_losses"}), `samples` ({"prompt", "tokens":
[{"text", "step"}]}). Every part of both is optional.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from pipeline.report.facts import finite, in_order
from pipeline.report.markdown import markdown


def write_report(directory: Path, report: dict, extras: dict) -> None:
    """Write report.json, report.md and report.html into an existing directory; a number that is not finite is null."""
    from pipeline.report.html import page  # matplotlib takes a while to import

    report, extras = in_order(finite(report)), finite(extras)
    texts = {
        "report.json": json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        "report.md": markdown(report, extras),
        "report.html": page(report, extras),
    }
    for name, text in texts.items():  # only once all three are made, so that they tell of the same run
        _write(directory / name, text)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(text.encode("utf-8", "backslashreplace"))  # half a surrogate pair is then a valid escape in JSON
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
