"""Leftovers of a killed driver in a run's directory do no harm to the next one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeline.storage.run_directory import RunDirectory

# Dies where the file is written and not yet in its place, or the link made and not yet in its
# place.
KILLED_AT_THE_RENAME = """
import os, signal, sys
from pathlib import Path
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.stage_directory import StageDirectory
from pipeline.storage.atomic import write_text
run = RunDirectory(Path(sys.argv[1]))
os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "file":
    write_text(run.path / "run.yaml", "half")
else:
    run.link_latest(StageDirectory(run.store, "seeds", "0" * 64))
"""


def files(run: RunDirectory) -> set[str]:
    return {str(path.relative_to(run.path)) for path in run.path.rglob("*") if not path.is_dir()}


@pytest.mark.slow
def test_leftovers_of_killed_drivers_are_removed_and_nothing_else(tmp_path):
    run = RunDirectory(tmp_path)
    for folder in ("seeds-11111111", "latest/.ipynb_checkpoints"):
        (run.path / folder).mkdir(parents=True)
    for theirs in ("run.yaml", "seeds-11111111/of-a-live-run.tmp", "mine.tmp", "latest/.notes"):
        (run.path / theirs).touch()
    before = files(run)
    for what in ("file", "link"):
        died = subprocess.run(
            [sys.executable, "-c", KILLED_AT_THE_RENAME, run.path, what], check=False
        )
        assert died.returncode == -9
    assert len(files(run) - before) == 2
    with run.locked():
        assert files(run) - {"lock"} == before, "stages sweep their own, when they hold them"
