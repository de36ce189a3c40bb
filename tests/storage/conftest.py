"""A record of the writes that reach the disk, in order."""

from __future__ import annotations

import os

import pytest

from tests.unsynced import fsync


@pytest.fixture
def disk_acts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every fsync and rename from here on, in order, each with the inode that it is of."""
    acts: list[tuple[str, int]] = []
    replace = os.replace

    def recorded_fsync(handle: int) -> None:
        fsync(handle)
        acts.append(("fsync", os.fstat(handle).st_ino))

    def recorded_replace(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
        acts.append(("rename", os.stat(source).st_ino))
        replace(source, path)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    return acts
