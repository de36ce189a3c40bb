"""How far a check is, told across processes: whoever decodes writes it into one small file, whoever waits reads it.

The file says nothing that lasts. It is written at most every half second, between what is timed, and a disk that takes
no more of it stops nothing.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

SECONDS_BETWEEN_WRITES = 0.5


@dataclass(frozen=True)
class Standing:
    """Done of total in a part of the check; a total of 0 is not known."""

    part: str
    done: int
    total: int
    unit: str = "prompts"


class Progress:
    """Writes where a check stands; without a file it tells nobody."""

    def __init__(self, path: Path | None = None):
        self.path = path
        self._standing = Standing("", 0, 0)
        self._written = 0.0

    def begin(self, part: str, total: int, *, done: int = 0, unit: str = "prompts") -> None:
        """The next part begins."""
        self._standing = Standing(part, done, total, unit)
        self._write()

    def advance(self, number: int = 1) -> None:
        """So many more of this part's units are done."""
        now = self._standing
        self._standing = Standing(now.part, now.done + number, now.total, now.unit)
        if time.monotonic() - self._written >= SECONDS_BETWEEN_WRITES:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.write_text(json.dumps(asdict(self._standing)), encoding="utf-8")


def read_standing(path: Path) -> Standing | None:
    """What was written last; None where nothing was, or where it is being written."""
    try:
        return Standing(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
