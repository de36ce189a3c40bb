"""A file's size, modification time and sha256 as it was written; whether the file still has them.

A file with the written size and time counts as unchanged, since reading 650 GB takes an hour; one
with another time is read again. `verify` reads every file.
"""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FLUSH_BYTES = 32 * 1024**2  # else a disk idles until a shard is committed


@dataclass(frozen=True)
class FileFacts:
    """A file's size in bytes, its modification time in nanoseconds, its sha256 (hex)."""

    size: int
    mtime_ns: int
    sha256: str

    @classmethod
    def of(cls, path: Path, sha256: str | None = None) -> FileFacts:
        """The facts of a file, which is read unless its sha256 is given."""
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, sha256 or sha256_of(path))

    def renewed(self, path: Path) -> FileFacts | None:
        """The facts with the file's current time, or None where its content has changed."""
        if not self.fit(path):
            return None
        mtime_ns = path.stat().st_mtime_ns
        if mtime_ns == self.mtime_ns:
            return self
        if sha256_of(path) != self.sha256:
            return None
        return replace(self, mtime_ns=mtime_ns)

    def fit(self, path: Path) -> bool:
        """Whether `path` is a file of this size; nothing is read."""
        return path.is_file() and path.stat().st_size == self.size

    def problems(self, path: Path) -> list[str]:
        """Read the file; what is wrong with it, in one line, or nothing."""
        if not path.is_file():
            return [f"{path} is missing"]
        found = FileFacts.of(path)
        if found.sha256 == self.sha256:
            return []
        sizes = f"{found.size} bytes, {self.size} were written"
        return [f"{path} is damaged: {sizes}, or another sha256"]


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class HashedFile(io.FileIO):
    """A new file with the sha256 of what was written to it; the disk writes behind the caller."""

    def __init__(self, path: Path):
        super().__init__(path, "w")
        self._digest = hashlib.sha256()
        self._size = self._flushed = 0

    def write(self, data: Any) -> int:
        """Write and hash all of `data`."""
        self._digest.update(data)
        self._write(data)
        return len(data)

    def sha256(self) -> str:
        """The sha256 (hex) of all that has been written so far."""
        return self._digest.hexdigest()

    def sync(self) -> None:
        """Bring everything to the disk."""
        os.fsync(self.fileno())

    def _write(self, data: Any) -> None:
        unwritten = memoryview(data)
        while unwritten:
            unwritten = unwritten[super().write(unwritten) :]
        self._size += len(data)
        unflushed = self._size - self._flushed
        if unflushed >= FLUSH_BYTES:
            # Linux begins to write these pages to the disk, and does not wait for it.
            os.posix_fadvise(self.fileno(), self._flushed, unflushed, os.POSIX_FADV_DONTNEED)
            self._flushed = self._size
