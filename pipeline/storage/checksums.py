"""A file's size, modification time and sha256 as it was written, and whether the file still has them.

A file with the written size and time counts as unchanged, since reading 650 GB takes an hour; one with another time is
read again. `verify` reads every file.
"""

from __future__ import annotations

import hashlib
import io
import os
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.storage.atomic import open_file

WORTH_A_THREAD = 64 * 1024  # bytes; below, handing them over takes longer than hashing
FLUSH_BYTES = 128 * 1024**2  # a disk that first sees a shard when it is committed has idled until then


@dataclass(frozen=True)
class FileFacts:
    """A file's size in bytes, its modification time in nanoseconds, its sha256 (hex)."""

    size: int
    mtime_ns: int
    sha256: str

    @classmethod
    def of(cls, path: Path, sha256: str | None = None) -> FileFacts:
        """The facts of a file, which is read unless its sha256 is given."""
        stat = path.stat()
        return cls(stat.st_size, stat.st_mtime_ns, sha256 or sha256_of(path))

    def renewed(self, path: Path) -> FileFacts | None:
        """The facts with the file's current time, or None where its content has changed."""
        if not self.fit(path):
            return None
        mtime_ns = path.stat().st_mtime_ns
        if mtime_ns == self.mtime_ns:
            return self
        return replace(self, mtime_ns=mtime_ns) if sha256_of(path) == self.sha256 else None

    def fit(self, path: Path) -> bool:
        """Whether `path` is a file of this size; nothing is read."""
        return path.is_file() and path.stat().st_size == self.size


def sha256_of(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class HashedFile(io.RawIOBase):
    """A new file that is written, hashed and flushed by three threads, while the caller makes the next block."""

    def __init__(self, path: Path, threads: Executor):
        self._file, self._threads = path.open("wb", buffering=0), threads
        self._digest = hashlib.sha256()
        self._size = self._unflushed = 0
        self._under_way: list[Future[None]] = []  # of the last block: its writing and its hashing
        self._flushing: Future[None] | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        """Write and hash all of `data`; at most one block waits for that. An error of the last one is raised here."""
        block = bytes(data)
        self._settle()
        if len(block) < WORTH_A_THREAD:
            self._digest.update(block)
            self._write(block)
        else:
            self._under_way = [
                self._threads.submit(self._digest.update, block),
                self._threads.submit(self._write, block),
            ]
        self._size += len(block)
        return len(block)

    def close(self) -> None:
        self._file.close()
        super().close()

    def sha256(self) -> str:
        """The sha256 (hex) of all that has been written so far."""
        self._settle()
        return self._digest.hexdigest()

    def sync(self) -> str:
        """Bring everything to the disk and return the sha256 (hex) of all that was written."""
        sha256 = self.sha256()
        if self._flushing:
            self._flushing.result()
        os.fsync(self._file.fileno())
        return sha256

    def _settle(self) -> None:
        """Wait for the last block."""
        under_way, self._under_way = self._under_way, []
        for work in under_way:
            work.result()

    def _write(self, block: bytes) -> None:
        unwritten = memoryview(block)
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) :]
        self._unflushed += len(block)
        if self._unflushed >= FLUSH_BYTES and (self._flushing is None or self._flushing.done()):
            if self._flushing:
                self._flushing.result()  # the disk tells an error once
            self._flushing, self._unflushed = self._threads.submit(os.fdatasync, self._file.fileno()), 0
