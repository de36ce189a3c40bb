"""One stage's directory: `<stage>-<fingerprint[:8]>/` with its shards, their quarantine files, and DONE.json.

A stage directory belongs to one fingerprint and is never overwritten by another meaning. Which shards exist is read
from their footers, never counted or remembered; DONE.json adds each file's size and sha256, for `verify`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import EnvironmentFault
from pipeline.storage.durable import read_json, sweep_temporary, write_json
from pipeline.storage.shards import Receipt, read_receipt


@dataclass(frozen=True)
class ShardTask:
    """One unit of work, picklable: which upstream shard to read, which shard to write."""

    index: int
    source: str  # path of the upstream shard
    upstream: str  # its content hash
    shard: str
    quarantine: str
    fingerprint: str


class StageDirectory:
    """The directory of one stage of one fingerprint."""

    def __init__(self, store: Path, stage: str, fingerprint: str):
        self.stage, self.fingerprint = stage, fingerprint
        self.path = store / f"{stage}-{fingerprint[:8]}"

    @classmethod
    def at(cls, path: Path) -> StageDirectory:
        """An existing stage directory as it lies, also when it was copied elsewhere."""
        described = read_json(path / "stage.json") or {}
        stage = cls(path.parent, described.get("stage", path.name.rpartition("-")[0]), described.get("fingerprint", ""))
        stage.path = path
        return stage

    def create(self, identity: dict[str, Any]) -> None:
        """Make the directory and say in stage.json what it depends on."""
        self.path.mkdir(parents=True, exist_ok=True)
        if read_json(self.path / "stage.json") is None:
            write_json(self.path / "stage.json", {"stage": self.stage, "fingerprint": self.fingerprint, "identity": identity})

    @property
    def identity(self) -> dict[str, Any]:
        return (read_json(self.path / "stage.json") or {}).get("identity", {})

    @property
    def done(self) -> dict[str, Any] | None:
        """DONE.json's content, or None while the stage is unfinished."""
        return read_json(self.path / "DONE.json")

    @property
    def summary(self) -> dict[str, Any]:
        return (self.done or {}).get("summary", {})

    def shard_path(self, index: int) -> Path:
        return self.path / "shards" / f"{index:05d}.parquet"

    def quarantine_path(self, index: int) -> Path:
        return self.path / "quarantine" / f"{index:05d}.jsonl"

    def shards(self) -> list[Path]:
        """The committed shards, in order."""
        return sorted((self.path / "shards").glob("*.parquet"))

    def receipts(self) -> dict[int, Receipt]:
        """The receipts of whole shards of this fingerprint; damaged and foreign files are as if absent."""
        found = (read_receipt(path) for path in self.shards())
        return {r.index: r for r in found if r and r.fingerprint == self.fingerprint and self.quarantine_path(r.index).exists()}

    def tasks(self, upstream: StageDirectory) -> list[ShardTask]:
        """One task per upstream shard."""
        return [
            ShardTask(
                index=index,
                source=str(upstream.shard_path(index)),
                upstream=receipt.content_sha256,
                shard=str(self.shard_path(index)),
                quarantine=str(self.quarantine_path(index)),
                fingerprint=self.fingerprint,
            )
            for index, receipt in sorted(upstream.receipts().items())
        ]

    def pending(self, tasks: Sequence[ShardTask]) -> list[ShardTask]:
        """The tasks whose shard does not exist, or was made from other upstream content."""
        have = self.receipts()
        return [task for task in tasks if task.index not in have or have[task.index].upstream != task.upstream]

    def finish(self, summary: dict[str, Any], files: Sequence[Path] = ()) -> dict[str, Any]:
        """Write DONE.json: the summary, and size and sha256 of every shard (or of `files`)."""
        listed = [*self.shards(), *sorted((self.path / "quarantine").glob("*.jsonl")), *files]
        done = {
            "stage": self.stage,
            "fingerprint": self.fingerprint,
            "shards": [asdict(receipt) for _, receipt in sorted(self.receipts().items())],
            "files": {str(path.relative_to(self.path)): file_facts(path) for path in listed},
            "summary": summary,
        }
        write_json(self.path / "DONE.json", done)
        return done

    def reopen(self) -> None:
        """Forget that the stage was finished; what is still valid will be kept."""
        (self.path / "DONE.json").unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory for one driver, and clean up after a killed one.

        Raises:
            EnvironmentFault: Another living process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with lock(self.path / "lock", f"the {self.stage} stage"):
            sweep_temporary(self.path)
            yield


def file_facts(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


@contextlib.contextmanager
def lock(path: Path, what: str) -> Iterator[None]:
    """Hold an advisory lock; the kernel drops it with its process, so a dead holder never blocks.

    Raises:
        EnvironmentFault: Another living process holds it.
    """
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "unknown process"
            raise EnvironmentFault(
                f"Another run holds {what}.", f"{path}, held by {holder}", "Wait for it or stop it, then run the same command again."
            ) from None
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
