"""Fingerprints: what a stage's result depends on, as one sha256.

A fingerprint covers meaning and content (settings, code version, upstream, input bytes, the
target's weights), never paths or placement, so that a copied cache resumes elsewhere and going from
1 to 8 GPUs resumes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pipeline.storage.atomic import read_object, write_text
from pipeline.storage.checksums import sha256_of


def fingerprint(parts: dict[str, Any]) -> str:
    """The sha256 (hex) of JSON-able parts, independent of the order of keys."""
    canonical = json.dumps(
        parts, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return hashlib.sha256(canonical.encode()).hexdigest()


def ids_digest(ids: Iterable[str]) -> str:
    """The sha256 (hex) of ids in their order; length-prefixed, so that no two lists collide by
    concatenation.
    """
    digest = hashlib.sha256()
    for row_id in ids:
        encoded = row_id.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.hexdigest()


def is_digest(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


class FileDigests:
    """sha256 of files, remembered by size, times and inode in a small JSON file.

    Hashing 140 GB of weights takes minutes; a second run should not pay for it. A file that changes
    behind the same path changes one of them and is hashed again: the time of its last change
    (ctime) is the kernel's own, also where a copying tool sets the modification time back. The
    file's position in a directory counts, not its path. `read_only` remembers nothing for the next
    time.
    """

    def __init__(self, cache: Path, *, read_only: bool = False):
        self.cache, self.read_only = cache, read_only
        self.seen: dict[Path, str] = {}  # as each file was when it was first asked for
        self.known: dict[str, str] = read_object(cache)

    def of(self, path: Path) -> str:
        """The file's sha256 (hex); the Hub's cache names large files by it already."""
        digest = self._digest(path)
        self.seen.setdefault(path, digest)
        return digest

    def changed(self) -> list[Path]:
        """The files that are no longer what they were when they were first asked for."""
        return [
            path
            for path, digest in self.seen.items()
            if not path.is_file() or self._digest(path) != digest
        ]

    def _digest(self, path: Path) -> str:
        blob = path.resolve()
        if blob.parent.name == "blobs" and is_digest(blob.name):
            return blob.name
        stat = path.stat()
        key = f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}:{stat.st_ino}:{path.name}"
        return self.derived(key, lambda: sha256_of(path))

    def derived(self, key: str, make: Callable[[], str]) -> str:
        """A sha256 (hex) that takes long to make and follows from what `key`, a fingerprint,
        names.
        """
        if key not in self.known:
            self.known[key] = make()
            if not self.read_only:
                write_text(self.cache, json.dumps(self.known))
        return self.known[key]

    def of_all(self, paths: Iterable[Path]) -> dict[str, str]:
        """Name to sha256 for each file, in the order of names."""
        return {path.name: self.of(path) for path in sorted(paths, key=lambda p: p.name)}
