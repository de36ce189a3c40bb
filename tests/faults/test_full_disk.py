"""The disk fills up while a stage is at work: what it has committed stays, the same command goes on
from there.

What happens when it is full as a stage starts, in every stage: tests/test_bad_machine.py.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pipeline.cli.app import app
from pipeline.cli.ending import ends_well
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.stage_directory import StageDirectory
from tests.faults.small_disk import fill_up, make_room, runs_in_a_namespace
from tests.faults.unfinished import assert_as_uninterrupted, temporary_files, write_config
from tests.flows.tiny import SHARDED, STAGES, latest, shards_made, stages_run

pytestmark = pytest.mark.fault
pytest_plugins = ["tests.flows.failing"]


@pytest.fixture
def run_before(small_disk, finished_run):
    """The finished stages before one, on the small disk."""

    def copy(stage: str) -> RunDirectory:
        run = RunDirectory(small_disk / "run")
        run.path.mkdir()
        for name in STAGES[: STAGES.index(stage)]:
            done = latest(finished_run, name).path
            shutil.copytree(done, run.path / done.name)
        return run

    return copy


def runs_through(root: Path, make_settings, tmp_path: Path) -> bool:
    config = write_config(tmp_path / "good.yaml", make_settings(root))
    return (
        ends_well(lambda: app(["run", str(config), "--executor", "inline"], standalone_mode=False))
        == 0
    )


@pytest.mark.parametrize("name", SHARDED)
def test_a_disk_that_is_full_after_a_stage_s_first_shard_costs_no_shard_that_was_committed(
    small_disk, run_before, finished_run, run_fails, make_settings, tmp_path, monkeypatch, name
):
    run, real = run_before(name), RunDirectory.event

    def event(self, kind, **facts):
        real(self, kind, **facts)
        if (kind, facts.get("stage"), facts.get("shard")) == ("shard", name, 0):
            fill_up(small_disk)

    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "event", event)
        said = run_fails(4, run__root=str(small_disk))
    assert said.startswith("The disk is full") and "run the same command again" in said
    assert list(latest(run, name).receipts()) == [0] and temporary_files(run) == []
    make_room(small_disk)
    assert runs_through(small_disk, make_settings, tmp_path)
    assert name == "seeds" or [made for made in shards_made(run) if made[0] == name] == [
        (name, i) for i in (1, 2, 3)
    ]
    assert_as_uninterrupted(run, finished_run)


@pytest.mark.parametrize("name", ["train", "calibrate", "export", "check"])
def test_a_disk_that_is_full_as_a_stage_ends_leaves_it_undone_and_the_same_command_finishes(
    small_disk, run_before, finished_run, run_fails, make_settings, tmp_path, monkeypatch, name
):
    run, real = run_before(name), StageDirectory.finish

    def finish(self, *arguments):
        if self.stage == name:
            fill_up(small_disk)
        real(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(StageDirectory, "finish", finish)
        said = run_fails(4, run__root=str(small_disk))
    assert said.startswith("The disk is full") and "run the same command again" in said
    assert latest(run, name).done is None and temporary_files(run) == []
    make_room(small_disk)
    assert runs_through(small_disk, make_settings, tmp_path) and stages_run(run)[0] == name
    assert_as_uninterrupted(run, finished_run)
    heads = [latest(of, "train").path / "heads.safetensors" for of in (run, finished_run)]
    assert heads[0].read_bytes() == heads[1].read_bytes()


@pytest.mark.skipif(os.geteuid() == 0, reason="root mounts without one")
def test_whoever_is_not_root_tries_the_same_in_a_namespace():
    assert runs_in_a_namespace(__file__)
