"""DONE.json: that a stage is finished."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.errors import DataError
from pipeline.storage.atomic import write_json
from pipeline.storage.checksums import FileFacts
from pipeline.storage.receipts import Receipt

Identity = dict[str, Any]  # what a result depends on; JSON
Summary = dict[str, Any]  # what a finished stage says of itself; each stage has its own keys


@dataclass(frozen=True)
class Done:
    """DONE.json: that a stage is finished, from what, and every file that counts."""

    stage: str
    fingerprint: str
    upstream: dict[str, str]  # the content of what it was made from, by stage
    shards: list[Receipt]
    files: dict[str, FileFacts]  # by path in the directory
    summary: Summary

    @classmethod
    def read(cls, directory: Path) -> Done | None:
        """None while the stage is unfinished, or where the file is damaged.

        Raises:
            DataError: It names a file outside of the directory.
        """
        path = directory / "DONE.json"
        try:
            done = DONE.validate_json(path.read_bytes(), strict=True)
        except (OSError, ValidationError):
            return None
        if outside := next((name for name in done.files if _leaves(name)), None):
            fix = "Somebody has changed it. Delete it and run the same command again: what is whole is kept."
            raise DataError(f"A stage's record names a file outside of the stage: {outside}.", str(path), fix)
        return done

    def write(self, directory: Path) -> None:
        write_json(directory / "DONE.json", asdict(self))


DONE = TypeAdapter(Done)


def _leaves(name: str) -> bool:
    """Whether a name leads out of the directory that it is read in."""
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name
