"""ARCHIVE.json: which run an archive is of, and the name, size, time and sha256 of every file in it.

Objects are named by their sha256: the same content is stored once, and an archive that is brought up to date overwrites
nothing. The manifest is written last, in one piece, and has a sha256 of itself.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.archive.places import Place
from pipeline.errors import DataError
from pipeline.storage.checksums import FileFacts

MANIFEST, OWNER = "ARCHIVE.json", "RUN.json"
OBJECTS, VERIFIED = "objects", "verified"
FORM = 1


@dataclass(frozen=True)
class Manifest:
    """An archive's content: files by their path in the run directory, and where `latest/STAGE` leads."""

    run: str
    files: dict[str, FileFacts]
    links: dict[str, str]
    form: int = FORM

    def write(self, place: Place) -> None:
        said = asdict(self)
        place.write(MANIFEST, iter([json.dumps(said | {"sha256": _digest(said)}, indent=1).encode()]))

    @classmethod
    def read(cls, place: Place) -> Manifest:
        """The manifest of a finished archive.

        Raises:
            DataError: There is none, somebody has changed it, or it names files outside of the run.
        """
        content = place.read(MANIFEST)
        if content is None:
            fix = "Name the address that `medusa-distill archive` was given; an unfinished archive is finished by it."
            raise DataError("There is no finished archive.", place.address, fix)
        try:
            said: dict[str, Any] = json.loads(content)
            digest = said.pop("sha256", None)
            manifest = MANIFESTS.validate_json(json.dumps(said), strict=True)
        except (ValueError, AttributeError, TypeError, ValidationError):
            manifest, digest = None, None
        if manifest is None or digest != _digest(said) or manifest.form != FORM:
            fix = "Archive the run again from where it lies."
            raise DataError(f"The archive's {MANIFEST} is damaged, or of another version.", place.address, fix)
        links = (target for one in manifest.links.items() for target in one)
        if outside := next((name for name in (*manifest.files, *links) if leads_out(name)), None):
            raise DataError(f"The archive names a file outside of the run: {outside}.", place.address)
        return manifest


MANIFESTS = TypeAdapter(Manifest)


def object_name(sha256: str) -> str:
    return f"{OBJECTS}/{sha256[:2]}/{sha256}"


def leads_out(name: str) -> bool:
    """Whether a name leads out of the directory that it is read in."""
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name


def run_id(path: Path) -> str:
    """What tells a run from all others, also where it was copied: a sha256 of its first event, which has the time."""
    events = path / "events.jsonl"
    first = events.open("rb").readline() if events.is_file() else b""
    return hashlib.sha256(b"run:" + first).hexdigest()


def _digest(said: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
