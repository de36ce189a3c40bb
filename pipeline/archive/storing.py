"""Copy a run to an archive: what its `latest` stages hold, its configuration, events and reports.

Promises: a file is read once, and what is sent is what DONE.json says; every object is read back and compared before it
counts; what has arrived is not sent again; a run that is being written, and the archive of another run, are refused.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pipeline.archive.manifest import MANIFEST, OBJECTS, OWNER, VERIFIED, Manifest, object_name, run_id
from pipeline.archive.places import BLOCK, Place
from pipeline.errors import ConfigError, DataError
from pipeline.storage.checksums import FileFacts
from pipeline.storage.description import Description
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.stage_directory import BOOKKEEPING

KEPT_BOOKKEEPING = {"stage.json", "upstream.json", "DONE.json", "receipts"}
REPORTS = ("run.yaml", "events.jsonl", "report.json", "report.md", "report.html")

AT_ONCE = 8  # files: an object store answers each in tenths of a second
Show = Callable[[int, int, int], None]  # objects that are there, in all, and bytes sent


@dataclass(frozen=True)
class Stored:
    """What an archive holds now."""

    num_files: int
    num_bytes: int
    num_sent: int  # objects; the others were there


def store_run(
    run: RunDirectory,
    place: Place,
    show: Show = lambda done, total, sent: None,
    stages: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> Stored:
    """Make the archive at `place` hold this run as it is now.

    Args:
        stages: By the name of each stage what in its directory does not go once it is finished. A link of such a name
            must lead to a stage.

    Raises:
        EnvironmentFault: Another process writes the run; the place cannot be reached.
        ConfigError: Something else than this run's archive is there.
        DataError: A file of the run is damaged, or changes while it is read.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(run.locked())
        _require_own_folders(run)
        for stage in run.stages().values():
            held.enter_context(stage.lock).share()
        _require_whole_records(run, stages)
        _claim(run, place)
        found = _files(run, stages)
        facts: dict[str, FileFacts] = {}
        wanted: dict[str, tuple[Path, FileFacts]] = {}
        for name, (path, written) in sorted(found.items()):
            facts[name] = written or FileFacts.of(path)
            wanted[f"{VERIFIED}/{facts[name].sha256}"] = path, facts[name]
        arrived = _arrived(place)
        sent = together(
            (functools.partial(_send, path, known, place), known.size)
            for name, (path, known) in wanted.items()
            if arrived.get(name) != known.size
        )
        num_sent = num_bytes = 0
        there = sum(arrived.get(name) == known.size for name, (_, known) in wanted.items())
        show(there, len(wanted), 0)
        for size in sent:
            num_sent, num_bytes = num_sent + 1, num_bytes + size
            show(there + num_sent, len(wanted), num_bytes)
        links = {name: stage.path.name for name, stage in run.stages().items()}
        Manifest(run_id(run.path), facts, links).write(place)
    return Stored(len(facts), sum(one.size for one in facts.values()), num_sent)


def _arrived(place: Place) -> dict[str, int]:
    """The size of each object that was read back after it was sent, by the name of its mark."""
    objects, marks = place.sizes(OBJECTS), place.sizes(VERIFIED)
    named = {mark: object_name(mark.rpartition("/")[2]) for mark in marks}
    return {mark: objects[name] for mark, name in named.items() if name in objects}


def together(jobs: Iterable[tuple[Callable[[], None], int]]) -> Iterator[int]:
    """Do what was asked for, several at a time; each one's number as it is done. The first error ends the others."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        under_way = {pool.submit(job): number for job, number in jobs}
        try:
            for finished in as_completed(under_way):
                finished.result()
                yield under_way[finished]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _claim(run: RunDirectory, place: Place) -> None:
    """Say whose archive this is, before the first object."""
    ours = run_id(run.path)
    content = place.read(OWNER)
    if content is None:
        if place.read(MANIFEST) is not None or place.sizes(""):
            fix = "Name a folder of its own for each run, such as s3://bucket/runs/NAME."
            raise ConfigError("Something else lies there, and an archive overwrites nothing.", place.address, fix)
        place.write(OWNER, iter([json.dumps({"run": ours, "name": run.path.name}).encode()]))
        return
    try:
        theirs = json.loads(content)
        whose, name = theirs["run"], str(theirs["name"])
    except (ValueError, TypeError, KeyError):
        whose, name = None, "unknown"
    if whose != ours:
        fix = "Name a folder of its own for each run, such as s3://bucket/runs/NAME."
        raise ConfigError(f"The archive there is of another run ('{name}').", place.address, fix)


def _require_own_folders(run: RunDirectory) -> None:
    """Raise DataError where a stage's directory is itself a link: its lock would be written elsewhere."""
    for link in run.links():
        if (folder := link.parent / os.readlink(link)).is_symlink():
            fix = "Delete this link and put the directory back; to store stages elsewhere, set run.store."
            raise DataError("A link leads out of the run directory.", str(folder), fix)


def _require_whole_records(run: RunDirectory, names: Collection[str]) -> None:
    """Raise DataError where there is no stage, or one is gone, or its record cannot be read: nobody can say which files
    count."""
    fix = "Run the same configuration again: what is damaged is made anew."
    found = run.stages()
    if not found:
        raise DataError("This run has no stage: there is nothing to archive.", str(run.path / "latest"), fix)
    if gone := next((link for link in run.links() if link.name in names and link.name not in found), None):
        raise DataError(f"The directory of {gone.name} is missing, or of another stage.", str(gone), fix)
    for name, stage in found.items():
        for record in (stage.path / "stage.json", stage.path / "DONE.json"):
            if record.is_symlink():
                raise DataError("A link leads out of the stage's directory.", str(record), "Delete it and run again.")
        described, done = Description.read(stage.path), stage.done
        if described is None or (done and done.fingerprint != described.fingerprint):
            raise DataError(f"The description of {name} is damaged.", str(stage.path / "stage.json"), fix)
        if done is None and os.path.lexists(stage.path / "DONE.json"):
            raise DataError(f"The record of {name} cannot be read.", str(stage.path / "DONE.json"), fix)


def _files(run: RunDirectory, stages: Mapping[str, Collection[str]]) -> dict[str, tuple[Path, FileFacts | None]]:
    """The files that count, by their name in the archive, with what DONE.json says of them.

    Links that no stage has made, such as Weights & Biases' to its logs, do not count, nor do shards that the record of
    a finished stage does not name.
    """
    found: dict[str, tuple[Path, FileFacts | None]] = {
        name: (run.path / name, None) for name in REPORTS if (run.path / name).is_file()
    }
    for stage in run.stages().values():
        done = stage.done
        written = done.files if done else {}
        left_out = {*BOOKKEEPING} - KEPT_BOOKKEEPING | {*(stages.get(stage.stage, ()) if done else ())}
        for path in stage.path.rglob("*"):
            name = path.relative_to(stage.path)
            if done and name.parts[0] == "shards" and name.as_posix() not in written:
                continue
            if path.is_file() and path.suffix != ".tmp" and not left_out & set(name.parts):
                if path.is_symlink():
                    if name.as_posix() not in written:
                        continue
                    raise DataError("A link leads out of the stage's directory.", str(path), "Delete it.")
                found[f"{stage.path.name}/{name.as_posix()}"] = (path, written.get(name.as_posix()))
        if missing := next((name for name in written if f"{stage.path.name}/{name}" not in found), None):
            fix = "Run the same configuration again: it is made anew."
            raise DataError(f"A file of {stage.stage} is missing.", str(stage.path / missing), fix)
    return found


def _send(path: Path, facts: FileFacts, place: Place) -> None:
    """Send one file, read it back, and only then say that it is there."""
    name = object_name(facts.sha256)
    digest = hashlib.sha256()
    place.write(name, _reading(path, digest))
    if digest.hexdigest() != facts.sha256:
        fix = "Run `medusa-distill verify`, then the same configuration again: what is damaged is made anew."
        raise DataError("A file is not what DONE.json says, or changed while it was read.", str(path), fix)
    arrived = hashlib.sha256()
    for block in place.blocks(name):
        arrived.update(block)
    if arrived.hexdigest() != facts.sha256:
        fix = "Archive it again: it is sent anew."
        raise DataError(f"What has arrived of {path.name} is not what was sent.", place.address, fix)
    place.write(f"{VERIFIED}/{facts.sha256}", iter([b"\n"]))


def _reading(path: Path, digest: hashlib._Hash) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            yield block
