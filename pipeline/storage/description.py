"""stage.json: which stage a directory is of, and what its result depends on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from pipeline.storage.atomic import read_file, write_json
from pipeline.storage.done import Identity


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
            return DESCRIPTION.validate_json(read_file(directory / "stage.json"), strict=True)
        except (OSError, ValidationError):
            return None

    def write(self, directory: Path) -> None:
        """Make the directory's stage.json say this."""
        said = json.loads(json.dumps(asdict(self)))
        found = Description.read(directory)
        if found is None or asdict(found) != said:
            write_json(directory / "stage.json", said)

    @property
    def upstream(self) -> set[str]:
        """The names of the stages that it reads."""
        found = self.identity.get("upstream")
        return set(found) if isinstance(found, dict) else set()


DESCRIPTION = TypeAdapter(Description)
