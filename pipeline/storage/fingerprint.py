"""Fingerprints of stages (sha256 of what a result depends on) and digests of files.

A fingerprint covers settings, code version, upstream results, input bytes and the target's weights.
It covers neither paths nor placement, so that a run can resume from a copied cache, or on 8 GPUs
instead of 1.

A file with the recorded size and modification time counts as unchanged, since reading 650 GB takes
an hour. A file with another time is read again. `verify` reads every file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.storage.atomic import JsonObject, read_object, write_text


def fingerprint(parts: JsonObject) -> str:
    """Return the sha256 (hex) of JSON data, independent of the order of keys."""
    canonical = json.dumps(
        parts, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return hashlib.sha256(canonical.encode()).hexdigest()


def ids_digest(ids: Iterable[str]) -> str:
    """Return the sha256 (hex) of row ids in order, each prefixed by its length in bytes."""
    digest = hashlib.sha256()
    for row_id in ids:
        encoded = row_id.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """Return a file's sha256 (hex)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class FileFacts:
    """A file's size in bytes, modification time in nanoseconds, and sha256 (hex)."""

    size: int
    mtime_ns: int
    sha256: str

    @classmethod
    def of(cls, path: Path, sha256: str | None = None) -> FileFacts:
        """Return the facts of a file, which is read unless its sha256 is given."""
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, sha256 or sha256_of(path))

    def renewed(self, path: Path) -> FileFacts | None:
        """Return the facts with the file's current time; None if the file is missing or changed.

        The file is read only if its time, but not its size, differs from the recorded one.
        """
        if not self.fit(path):
            return None
        mtime_ns = path.stat().st_mtime_ns
        if mtime_ns == self.mtime_ns:
            return self
        if sha256_of(path) != self.sha256:
            return None
        return replace(self, mtime_ns=mtime_ns)

    def fit(self, path: Path) -> bool:
        """Return whether `path` is a file of the recorded size; its content is not read."""
        return path.is_file() and path.stat().st_size == self.size

    def problems(self, path: Path) -> list[str]:
        """Read the file; return a list of messages about it.

        The list has one message if the file is missing or its sha256 differs, else none.
        """
        if not path.is_file():
            return [f"{path} is missing"]
        if FileFacts.of(path).sha256 == self.sha256:
            return []
        return [f"{path} is damaged: its size or sha256 is not the recorded one"]


class FileDigests:
    """The sha256 of files, cached in a JSON file by name, size, times and inode.

    Hashing 140 GB of weights takes minutes; a second run skips it. A file that was changed is
    hashed again, because its ctime differs even if a tool has restored the modification time.

    Args:
        cache: The JSON file; it need not exist.
        read_only: Whether the JSON file is never written.
    """

    def __init__(self, cache: Path, *, read_only: bool = False):
        self.cache, self.read_only = cache, read_only
        self.seen: dict[Path, str] = {}  # the digest of each file when it was first asked for
        self.known: dict[str, str] = read_object(cache)

    def of(self, path: Path) -> str:
        """Return a file's sha256 (hex); the first one that is returned is kept for `changed`."""
        digest = self._current_sha256(path)
        self.seen.setdefault(path, digest)
        return digest

    def of_all(self, paths: Iterable[Path]) -> dict[str, str]:
        """Return the sha256 (hex) of each file by file name, sorted by name."""
        return {path.name: self.of(path) for path in sorted(paths, key=lambda path: path.name)}

    def changed(self) -> list[Path]:
        """Return the files that are missing now, or whose sha256 is not what `of` first returned.

        These can only be files that were passed to `of`.
        """
        changed = []
        for path, digest in self.seen.items():
            if not path.is_file() or self._current_sha256(path) != digest:
                changed.append(path)
        return changed

    def derived(self, key: str, make: Callable[[], str]) -> str:
        """Return the digest cached under a key; if there is none, cache the digest of `make`."""
        if key not in self.known:
            self.known[key] = make()
            if not self.read_only:
                write_text(self.cache, json.dumps(self.known))
        return self.known[key]

    def _current_sha256(self, path: Path) -> str:
        """Return a file's current sha256 (hex): from its name, the cache, or the content.

        In the Hub's cache, large files are named by their sha256.
        """
        blob = path.resolve()
        if blob.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", blob.name):
            return blob.name
        stat = path.stat()
        key = f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}:{stat.st_ino}:{path.name}"
        return self.derived(key, lambda: sha256_of(path))
