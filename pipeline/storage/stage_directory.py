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
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.errors import DataError, EnvironmentFault
from pipeline.storage.durable import read_json, sweep_temporary, write_json
from pipeline.storage.fingerprint import fingerprint
from pipeline.storage.shards import Receipt, ShardWriter, read_receipt


@dataclass(frozen=True)
class ShardTask:
    """One unit of work, picklable: which upstream shard to read, which shard to write."""

    index: int
    source: str  # path of the upstream shard
    upstream: str  # its content hash
    shard: str
    quarantine: str
    fingerprint: str


def shard_writer(task: ShardTask, schema: pa.Schema, **more: Any) -> ShardWriter:
    """A writer of the shard that a task asks for."""
    return ShardWriter(
        task.shard,
        task.quarantine,
        schema,
        index=task.index,
        fingerprint=task.fingerprint,
        upstream=task.upstream,
        **more,
    )


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
            write_json(
                self.path / "stage.json", {"stage": self.stage, "fingerprint": self.fingerprint, "identity": identity}
            )

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
        return {
            r.index: r
            for r in found
            if r and r.fingerprint == self.fingerprint and self.quarantine_path(r.index).exists()
        }

    def require_own_shards(self) -> None:
        """Refuse to go on while a file that is no whole shard of this stage lies among its shards.

        Raises:
            DataError: Names the file.
        """
        ours = {self.shard_path(index) for index in self.receipts()}
        for path in self.shards():
            if path not in ours:
                fix = "Delete this file and run the same command again: what is missing is made anew."
                raise DataError("This shard is of another run, or damaged.", str(path), fix)

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

    def finish(self, summary: dict[str, Any], upstream: dict[str, str]) -> None:
        """Write DONE.json: the summary, what it was made from, and size and sha256 of every file that counts."""
        files = {str(path.relative_to(self.path)): file_facts(path) for path in self._lasting_files()}
        done = {
            "stage": self.stage,
            "fingerprint": self.fingerprint,
            "upstream": upstream,
            "shards": [asdict(receipt) for _, receipt in sorted(self.receipts().items())],
            "files": files,
            "summary": summary,
        }
        write_json(self.path / "DONE.json", done)

    @property
    def content(self) -> str:
        """A hash of what the stage made; what depends on it is stale when it changes. Logs (*.jsonl) do not count."""
        done = self.done or {}
        files = {name: facts["sha256"] for name, facts in done.get("files", {}).items() if not name.endswith(".jsonl")}
        return fingerprint({"made": [shard["content_sha256"] for shard in done.get("shards", [])] or files})

    def is_current(self, upstream: dict[str, str]) -> bool:
        """Whether the stage is finished, was made from this upstream content, and has all its files in full size."""
        done = self.done
        if done is None or done.get("fingerprint") != self.fingerprint or done.get("upstream") != upstream:
            return False
        return all(_size(self.path / name) == facts["size"] for name, facts in done["files"].items())

    def verify(self) -> list[str]:
        """Read every file again and say what is missing or damaged, one line each."""
        problems = []
        for name, facts in (self.done or {}).get("files", {}).items():
            path = self.path / name
            if not path.is_file():
                problems.append(f"{path} is missing")
            elif file_facts(path) != facts:
                problems.append(
                    f"{path} is damaged: {path.stat().st_size} bytes, {facts['size']} were written, or another sha256"
                )
        return problems

    def prepare(self, upstream: dict[str, str]) -> None:
        """Get ready to run: forget DONE.json, and drop what was made from other upstream content.

        Shards name their upstream shard one by one and are kept where it is unchanged.
        """
        made_from = read_json(self.path / "upstream.json")
        (self.path / "DONE.json").unlink(missing_ok=True)
        if made_from is not None and made_from != upstream:
            self.drop(keep=("shards", "quarantine"))
        write_json(self.path / "upstream.json", upstream)

    def drop(self, keep: Sequence[str] = ()) -> None:
        """Throw away what was made, for whoever holds the lock; what the directory is for stays."""
        for path in self.path.iterdir():
            if path.name not in ("stage.json", "lock", *keep):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _lasting_files(self) -> list[Path]:
        """Every file but the bookkeeping, checkpoints of a finished training, and the card, which is written again."""
        passing = {"stage.json", "upstream.json", "DONE.json", "lock", "README.md"}
        found = (path for path in sorted(self.path.rglob("*")) if path.is_file() and path.name not in passing)
        return [
            path for path in found if not {"checkpoints", "tensorboard", "ray"} & set(path.relative_to(self.path).parts)
        ]

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


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


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
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                fix = "Put run.root and run.store on a file system with locks (on NFS, with its lock daemon)."
                raise EnvironmentFault(f"The file system takes no lock: {error.strerror}.", str(path), fix) from None
            file.seek(0)
            holder = file.read().strip() or "unknown process"
            raise EnvironmentFault(
                f"Another run holds {what}.",
                f"{path}, held by {holder}",
                "Wait for it or stop it, then run the same command again.",
            ) from None
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
