"""DONE.json: that a stage is finished. It has a sha256 of all that it says, so that no changed figure is believed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.errors import DataError
from pipeline.storage.atomic import read_object, write_json
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
        said = read_object(path)
        own = said.pop("sha256", None)
        try:
            done = DONE.validate_json(json.dumps(said), strict=True)
        except ValidationError:
            return None
        if outside := next((name for name in done.files if _leaves(name)), None):
            fix = "Somebody has changed it. Delete it and run the same command again: what is whole is kept."
            raise DataError(f"A stage's record names a file outside of the stage: {outside}.", str(path), fix)
        return done if own == _digest(said) else None

    def write(self, directory: Path) -> None:
        said = asdict(self)
        write_json(directory / "DONE.json", said | {"sha256": _digest(said)})


DONE = TypeAdapter(Done)


def _digest(said: dict[str, Any]) -> str:
    """The sha256 (hex) of a record, whatever its layout."""
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _leaves(name: str) -> bool:
    """Whether a name leads out of the directory that it is read in."""
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name
