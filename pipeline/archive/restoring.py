"""Copy a run back from an archive.

Promises: every file is compared with its sha256 before it gets its name; what lies there already and is as it should be
is not fetched again; nothing is overwritten; run.yaml comes last, so that half a run is no run directory.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

from pipeline.archive.manifest import VERIFIED, Manifest, object_name
from pipeline.archive.places import Place
from pipeline.archive.storing import Show, Stored, together
from pipeline.errors import ConfigError, DataError, EnvironmentFault
from pipeline.storage.atomic import disk_errors, temporary_beside
from pipeline.storage.checksums import FileFacts, sha256_of

LAST = "run.yaml"


def restore_run(place: Place, directory: Path, show: Show = lambda done, total, sent: None) -> Stored:
    """Make `directory` hold the archived run.

    Raises:
        DataError: There is no finished archive, or an object of it is damaged or missing.
        ConfigError: Other files lie in the directory.
        EnvironmentFault: The place cannot be reached, or the disk is full.
    """
    manifest = Manifest.read(place)
    _require_room(directory, manifest, place)
    absent = {name: facts for name, facts in manifest.files.items() if not (directory / name).exists()}
    there, num_bytes = len(manifest.files) - len(absent), 0
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        fetched = together(
            (functools.partial(_fetch, place, name, facts, directory / name), facts.size)
            for name, facts in absent.items()
            if name != LAST
        )
        for number, size in enumerate(fetched, 1):
            num_bytes += size
            show(there + number, len(manifest.files), num_bytes)
        _link(directory, manifest)
        if LAST in absent:
            _fetch(place, LAST, absent[LAST], directory / LAST)
    return Stored(len(manifest.files), sum(facts.size for facts in manifest.files.values()), len(absent))


def _require_room(directory: Path, manifest: Manifest, place: Place) -> None:
    """Raise ConfigError where a file lies there that is not this archive's."""
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink():
            known = name in {f"latest/{stage}" for stage in manifest.links}
        elif path.is_dir() or path.suffix == ".tmp" or path.name == "lock":
            known = True
        else:
            facts = manifest.files.get(name)
            known = facts is not None and facts.fit(path) and sha256_of(path) == facts.sha256
        if not known:
            fix = f"Nothing was written. Restore {place.address} into a new directory."
            raise ConfigError("Another file lies where the run would be restored.", str(path), fix)


def _fetch(place: Place, name: str, facts: FileFacts, path: Path) -> None:
    """Fetch one file under a temporary name, compare it, and give it its name and its time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, digest = temporary_beside(path), hashlib.sha256()
    try:
        with temporary.open("wb") as file:
            try:
                for block in place.blocks(object_name(facts.sha256)):
                    digest.update(block)
                    file.write(block)
            except EnvironmentFault as fault:
                if isinstance(fault.__cause__, FileNotFoundError):
                    fix = (
                        "What was restored is kept. Archive the run again from where it lies, or restore another copy."
                    )
                    raise DataError(f"{name} is missing from the archive.", place.address, fix) from None
                raise
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != facts.sha256:
            mark = f"{VERIFIED}/{facts.sha256}"
            fix = (
                f"What was restored is kept. Delete {mark} there, which says that this file has arrived, and archive "
                "the run again from where it lies; or restore another copy."
            )
            raise DataError(f"{name} is damaged in the archive.", place.address, fix)
        os.utime(temporary, ns=(facts.mtime_ns, facts.mtime_ns))  # so that `run` need not read it again
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _link(directory: Path, manifest: Manifest) -> None:
    latest = directory / "latest"
    latest.mkdir(exist_ok=True)
    for stage, target in manifest.links.items():
        if not (latest / stage).is_symlink():
            (latest / stage).symlink_to(Path("..") / target, target_is_directory=True)
