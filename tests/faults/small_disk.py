"""Filling a small file system, and where to mount one without being root."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

IN_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


def runs_in_a_namespace(file: str) -> bool:
    """Run a file's tests as the root of a namespace of their own, where anyone may mount; skip
    where none is made.
    """
    if subprocess.run([*IN_NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("no namespace of mounts can be made here")
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", file, "-k", "not namespace"]
    done = subprocess.run([*IN_NAMESPACE, *words], capture_output=True, text=True)
    assert "skipped" not in done.stdout
    return done.returncode == 0


def fill_up(directory: Path) -> None:
    """Take all that is left of a disk."""
    with (directory / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def make_room(directory: Path) -> None:
    (directory / "ballast").unlink()
