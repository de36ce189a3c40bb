"""An object store on loopback, and what of a run an archive has to bring back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.storage.checksums import sha256_of
from tests.archive.s3_server import KEY, Bucket


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-no-consequence")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    made = Bucket()
    yield made
    made.close()


def content(run: Path) -> dict[str, str]:
    """The sha256 of every file of a run that counts, and where its links lead."""
    found = {}
    for path in run.rglob("*"):
        name = path.relative_to(run).as_posix()
        if path.is_symlink():
            found[name] = str(path.resolve().relative_to(run.resolve()))
        elif path.is_file() and path.name not in ("lock", "digests.json"):  # a cache of what was read here
            found[name] = sha256_of(path)
    return found
