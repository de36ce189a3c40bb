"""stage.json: which stage a directory is of, and what its result depends on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from pipeline.storage.atomic import read_json, write_json
from pipeline.storage.done import Identity

FILE = "stage.json"


@dataclass(frozen=True)
class Description:
    """A stage's name, its fingerprint, and the identity that the fingerprint is of."""

    stage: str
    fingerprint: str
    identity: Identity = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> Description | None:
        """None where the file is absent or damaged."""
        try:
            return DESCRIPTION.validate_json((directory / FILE).read_bytes(), strict=True)
        except (OSError, ValidationError):
            return None

    def write(self, directory: Path) -> None:
        """Make the directory's stage.json say this; nothing is written where it does."""
        content = json.loads(json.dumps(asdict(self)))
        if read_json(directory / FILE) != content:
            write_json(directory / FILE, content)


DESCRIPTION = TypeAdapter(Description)
