"""A JSON file through which one process reports its progress to another.

A report within half a second of the last one is left out, unless it has to be seen at once. A full
disk does not stop the work.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path

from pipeline.storage.atomic import JsonObject

SECONDS_BETWEEN_REPORTS = 0.5


class ProgressFile:
    """A progress file, which one process writes and another process reads."""

    def __init__(self, path: Path):
        self.path = path
        self._written = -math.inf

    def write(self, report: JsonObject, *, at_once: bool = False) -> None:
        """Store a report in the progress file unless one was stored within the last half second.

        With `at_once` it is always stored. A failed write is ignored.
        """
        now = time.monotonic()
        if at_once or now - self._written >= SECONDS_BETWEEN_REPORTS:
            self._written = now
            with contextlib.suppress(OSError):
                self.path.write_text(json.dumps(report), encoding="utf-8")

    def read(self) -> JsonObject | None:
        """Read the report last stored in this file; None if there is none or it is half-written."""
        try:
            report: JsonObject = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return report

    def remove(self) -> None:
        """Delete the stored progress file, if there is one."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
