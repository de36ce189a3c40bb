"""A JSON file through which one process reports its progress to another.

A report within half a second of the last one is dropped, unless it is urgent. A failed write, for
example on a full disk, is ignored.
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
    """A file with the latest progress report, which one process writes and another one reads."""

    def __init__(self, path: Path):
        self.path = path
        self._written = -math.inf

    def write(self, report: JsonObject, *, at_once: bool = False) -> None:
        """Write a report, unless this object has written one within the last half second.

        With `at_once` it is always written. A failed write is ignored.
        """
        now = time.monotonic()
        if at_once or now - self._written >= SECONDS_BETWEEN_REPORTS:
            self._written = now
            with contextlib.suppress(OSError):
                self.path.write_text(json.dumps(report), encoding="utf-8")

    def read(self) -> JsonObject | None:
        """Return the last report; None if the file is absent, unreadable or half-written."""
        try:
            return json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def remove(self) -> None:
        """Delete the file if it exists; a failure is ignored."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
