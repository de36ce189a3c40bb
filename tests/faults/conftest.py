"""What the fault tests share."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.faults.unfinished", "tests.faults.processes")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB; without the right to mount one there is none, see
    `runs_in_a_namespace`.
    """
    directory = tmp_path / "disk"
    directory.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(directory)]
    if (
        os.geteuid()
        or not shutil.which("mount")
        or subprocess.run(words, capture_output=True).returncode
    ):
        pytest.skip("no file system can be mounted here")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)
