"""The disk fills up, or a file reaches the limit of `ulimit -f`, at any moment of a stage: exit 4,
and the same command continues with everything that was committed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli.app import app, main
from pipeline.cli.ending import ends_well
from pipeline.flow import STAGES as STAGES_BY_NAME
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.stage_directory import StageDirectory
from tests.faults.unfinished import (
    assert_as_uninterrupted,
    cut_before,
    temporary_files,
    write_config,
)
from tests.flows.failing import committed
from tests.flows.tiny import SHARDED, STAGES, latest, shards_made, stages_run
from tests.forks import in_a_fork

pytestmark = pytest.mark.fault
pytest_plugins = ["tests.flows.failing"]


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 3 MB; skips the test without the right to mount one."""
    directory = tmp_path / "disk"
    directory.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(directory)]
    can_mount = os.geteuid() == 0 and shutil.which("mount")
    if not can_mount or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill_up(directory: Path, left: int = 0) -> None:
    with (directory / "ballast").open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(file.tell() - left)


def fill_at(disk: Path, name: str, moment: str, left: int, monkeypatch) -> None:
    """Fill the disk once when this stage starts, has committed its first shard, or ends."""
    event, finish, run = RunDirectory.event, StageDirectory.finish, STAGES_BY_NAME[name].run

    def fill_and_run(*arguments):
        fill_up(disk, left)
        return run(*arguments)

    def log_and_fill(self, kind, **facts):
        event(self, kind, **facts)
        if (kind, facts.get("stage"), facts.get("shard")) == ("shard", name, 0):
            fill_up(disk)

    def fill_and_finish(self, *arguments):
        if self.stage == name:
            fill_up(disk)
        finish(self, *arguments)

    if moment == "start":
        stage = replace(STAGES_BY_NAME[name], run=fill_and_run)
        monkeypatch.setitem(STAGES_BY_NAME, name, stage)
    elif moment == "shard":
        monkeypatch.setattr(RunDirectory, "event", log_and_fill)
    else:
        monkeypatch.setattr(StageDirectory, "finish", fill_and_finish)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's
@pytest.mark.parametrize(
    ("name", "moment", "left"),
    [
        *((name, "start", 0) for name in STAGES),
        ("generate", "start", 16_384),
        *((name, "start", 65_536) for name in ("features", "train", "export")),
        *((name, "shard", 0) for name in SHARDED),
        *((name, "end", 0) for name in STAGES[3:]),
    ],
)
def test_a_full_disk_loses_nothing_and_the_same_command_continues(
    small_disk, finished_run, run_fails, make_settings, tmp_path, monkeypatch, name, moment, left
):
    run = RunDirectory(small_disk / "run")
    run.path.mkdir()
    for earlier in STAGES[: STAGES.index(name)]:
        done = latest(finished_run, earlier).path
        shutil.copytree(done, run.path / done.name)
    before = committed(run)
    with monkeypatch.context() as patched:
        fill_at(small_disk, name, moment, left, patched)
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


def continues(config: Path) -> bool:
    words = ["run", str(config), "--executor", "inline"]
    return ends_well(lambda: app(words, standalone_mode=False)) == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_refused_rename_costs_one_shard(tmp_path, run_fails, monkeypatch, code):
    """Without a file system of its own, the same from the system call."""
    real = os.replace

    def refuse(source, destination):
        if Path(destination).match("generate-*/shards/00002.parquet"):
            raise OSError(code, os.strerror(code))
        real(source, destination)

    monkeypatch.setattr(os, "replace", refuse)
    assert "00002.parquet" in run_fails(4)
    run = RunDirectory(tmp_path / "run")
    assert sorted(run.latest("generate").receipts()) == [0, 1] and temporary_files(run) == []


def run_with_a_limit(config: Path, stage: str, limit: int) -> None:
    """Run the command; from the start of this stage no file may exceed so many bytes."""
    real = STAGES_BY_NAME[stage].run

    def run(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return real(*arguments)

    STAGES_BY_NAME[stage] = replace(STAGES_BY_NAME[stage], run=run)
    sys.argv = ["medusa-distill", "run", str(config), "--executor", "inline"]
    main()


@pytest.mark.parametrize(
    ("stage", "limit"),
    [
        *((stage, 16_384) for stage in STAGES[:-1]),
        *((stage, 1024) for stage in ("generate", "calibrate", "check")),
    ],
)
def test_a_run_continues_after_a_file_size_limit(
    copied_run, finished_run, make_settings, tmp_path, stage, limit, signals_as_they_were
):
    cut_before(copied_run, stage)
    config = write_config(tmp_path / "config.yaml", make_settings(tmp_path))
    ended, said = in_a_fork(run_with_a_limit, config, stage, limit)
    assert ended == 4, said
    assert temporary_files(copied_run) == []
    assert continues(config)
    assert_as_uninterrupted(copied_run, finished_run)
