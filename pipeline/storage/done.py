"""DONE.json: that a stage is finished, from what, and every file that counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.storage.atomic import write_json
from pipeline.storage.checksums import FileFacts
from pipeline.storage.receipts import Receipt

FILE = "DONE.json"

Identity = dict[str, Any]  # what a result depends on; JSON
Summary = dict[str, Any]  # what a finished stage says of itself; each stage has its own keys


@dataclass(frozen=True)
class Done:
    """The record of a finished stage."""

    stage: str
    fingerprint: str
    upstream: dict[str, str]  # the content of what it was made from, by stage
    shards: list[Receipt]
    files: dict[str, FileFacts]  # by path in the directory
    summary: Summary

    @classmethod
    def read(cls, directory: Path) -> Done | None:
        """None while the stage is unfinished, or where the file is damaged."""
        try:
            return DONE.validate_json((directory / FILE).read_bytes(), strict=True)
        except (OSError, ValidationError):
            return None

    def write(self, directory: Path) -> None:
        write_json(directory / FILE, asdict(self))


DONE = TypeAdapter(Done)
