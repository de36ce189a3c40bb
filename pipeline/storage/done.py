"""DONE.json: that a stage is finished."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.storage.atomic import read_json, write_json
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
        """None while the stage is unfinished, or where the file is damaged."""
        try:
            found = read_json(directory / "DONE.json") or {}
            files = {name: FileFacts(**facts) for name, facts in found["files"].items()}
            return cls(**found | {"files": files, "shards": [Receipt.of(shard) for shard in found["shards"]]})
        except (TypeError, KeyError, AttributeError):
            return None

    def write(self, directory: Path) -> None:
        write_json(directory / "DONE.json", asdict(self))
