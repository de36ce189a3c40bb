"""A worker that outlives its driver never changes the resumed run."""

from __future__ import annotations

import pytest

from pipeline.storage.run_directory import RunDirectory
from tests.faults.processes import Orphan
from tests.faults.unfinished import (
    assert_as_uninterrupted,
    cut_before,
    temporary_files,
    write_config,
)
from tests.flows.tiny import latest, run_again, shards_made, stages_run

pytestmark = pytest.mark.fault

INDEX = 1  # the shard that the orphan is busy with


@pytest.fixture
def orphan(copied_run, make_settings, tmp_path, name):
    """A worker of a dead driver that is about to open its shard."""
    cut_before(copied_run, name)
    config = write_config(tmp_path / "run.yaml", make_settings(tmp_path))
    orphan = Orphan(config, name, INDEX)
    yield orphan
    orphan.process.kill()
    orphan.process.join()


@pytest.mark.parametrize(
    ("name", "begins", "ends", "code"),
    [
        ("features", "meanwhile", "meanwhile", 0),
        ("generate", "before", "meanwhile", 1),  # the resumed run has removed its temporary file
        ("generate", "meanwhile", "after", 0),
        ("features", "meanwhile", "killed", -9),
    ],
)
def test_an_orphan_changes_nothing_whenever_it_writes(
    finished_run, orphan, make_config, tmp_path, monkeypatch, name, begins, ends, code
):
    real = RunDirectory.event

    def event(self, kind, **facts):
        real(self, kind, **facts)
        if (kind, facts.get("stage"), facts.get("shard")) == ("shard", name, INDEX + 1):
            if begins == "meanwhile":
                orphan.begin()
            if ends == "meanwhile":
                orphan.commit()

    if begins == "before":
        orphan.begin()
    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "event", event)
        run = run_again(make_config(tmp_path))
    made = [index for stage, index in shards_made(run) if stage == name]
    assert made == [0, 1, 2, 3] and latest(run, name).verify() == []
    if ends != "meanwhile":
        assert len(temporary_files(run)) == 1
    if ends == "killed":
        orphan.process.kill()
        orphan.process.join()
    elif ends == "after":
        orphan.commit()
    assert orphan.process.exitcode == code
    run = run_again(make_config(tmp_path))
    assert stages_run(run) == []
    assert_as_uninterrupted(run, finished_run)
