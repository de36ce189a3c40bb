"""A full disk ends a run with exit 4, and the same command resumes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.cli.app import app
from pipeline.cli.ending import ends_well
from pipeline.storage.run_directory import RunDirectory
from tests.faults.unfinished import (
    assert_as_uninterrupted,
    temporary_files,
    write_config,
)
from tests.flows.failing import committed
from tests.flows.tiny import SHARDED, STAGES, latest, shards_made, stages_run

pytestmark = pytest.mark.fault
pytest_plugins = ["tests.flows.failing"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB; skips the test if it cannot be mounted."""
    directory = tmp_path / "disk"
    directory.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(directory)]
    can_mount = os.geteuid() == 0 and shutil.which("mount")
    if not can_mount or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill_up(directory):
    with contextlib.suppress(OSError), (directory / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def fill_at(disk, name, moment, monkeypatch):
    """Fill the disk when a stage starts or has committed its first shard."""
    event = RunDirectory.event

    def log_and_fill(self, kind, **facts):
        event(self, kind, **facts)
        if (kind, facts.get("stage"), facts.get("shard", 0)) == (moment, name, 0):
            fill_up(disk)

    monkeypatch.setattr(RunDirectory, "event", log_and_fill)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's
@pytest.mark.parametrize(
    ("name", "moment"),
    [
        *((name, "stage-started") for name in STAGES),
        *((name, "shard") for name in SHARDED),
    ],
)
def test_a_full_disk_loses_nothing_and_the_same_command_continues(
    small_disk, finished_run, run_fails, make_settings, tmp_path, monkeypatch, name, moment
):
    run = RunDirectory(small_disk / "run")
    run.path.mkdir()
    for earlier in STAGES[: STAGES.index(name)]:
        done = latest(finished_run, earlier).path
        shutil.copytree(done, run.path / done.name)
    before = committed(run)
    with monkeypatch.context() as patched:
        fill_at(small_disk, name, moment, patched)
        said = run_fails(4, run__root=str(small_disk))
    assert "disk" in said and "again" in said and temporary_files(run) == []
    assert latest(run, name).done is None
    assert {file: data for file, data in committed(run).items() if file in before} == before
    kept = [(name, index) for index in latest(run, name).receipts()]
    assert moment != "shard" or kept == [(name, 0)]
    (small_disk / "ballast").unlink()
    config = write_config(tmp_path / "good.yaml", make_settings(small_disk))
    assert continues(config) and stages_run(run)[0] == name
    assert name == "seeds" or not set(kept) & set(shards_made(run))
    assert_as_uninterrupted(run, finished_run)


def continues(config):
    words = ["run", str(config), "--executor", "inline"]
    return ends_well(lambda: app(words, standalone_mode=False)) == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_refused_rename_costs_one_shard(tmp_path, run_fails, monkeypatch, code):
    """The same error from the system call, without a file system of its own."""
    real = os.replace

    def refuse(source, destination):
        if Path(destination).match("generate-*/shards/00002.parquet"):
            raise OSError(code, os.strerror(code))
        real(source, destination)

    monkeypatch.setattr(os, "replace", refuse)
    assert "00002.parquet" in run_fails(4)
    run = RunDirectory(tmp_path / "run")
    assert sorted(run.latest("generate").receipts()) == [0, 1] and temporary_files(run) == []
