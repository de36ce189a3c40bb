"""A worker that still writes after its driver died, while the resumed run is going and after it has
ended.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

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

pytestmark = [pytest.mark.fault, pytest.mark.parametrize("name", ["generate", "features"])]

INDEX = 1  # the shard that the orphan is busy with


@pytest.fixture
def orphan(copied_run, make_settings, make_config, tmp_path, name):
    """The worker of a run whose driver died in this stage: it is about to open its shard."""
    cut_before(copied_run, name)
    config = write_config(tmp_path / "run.yaml", make_settings(tmp_path))
    orphan = Orphan(config, name, INDEX)
    yield orphan
    orphan.process.kill()
    orphan.process.join()


@pytest.fixture
def resume(make_config, tmp_path, monkeypatch, name) -> Callable[..., RunDirectory]:
    """Resume the run; `meanwhile` is called when it has committed the shard after the orphan's."""

    def run_on(meanwhile: Callable[[], object] = lambda: None) -> RunDirectory:
        real = RunDirectory.event

        def event(self, kind, **facts):
            real(self, kind, **facts)
            if (kind, facts.get("stage"), facts.get("shard")) == ("shard", name, INDEX + 1):
                meanwhile()

        with monkeypatch.context() as patched:
            patched.setattr(RunDirectory, "event", event)
            return run_again(make_config(tmp_path))

    return run_on


def everything_is_kept(finished_run, make_config, tmp_path) -> None:
    """One more run finds all as it should be; what an orphan left is gone."""
    run = run_again(make_config(tmp_path))
    assert stages_run(run) == []
    assert_as_uninterrupted(run, finished_run)


def test_an_orphan_that_commits_while_the_run_is_in_its_stage_changes_nothing(
    finished_run, orphan, resume, make_config, tmp_path, name
):
    ended = []

    def commit() -> None:
        orphan.begin()
        ended.append(orphan.commit())

    run = resume(commit)
    assert ended == [0] and [shard for shard in shards_made(run) if shard[0] == name] == [
        (name, i) for i in range(4)
    ]
    assert_as_uninterrupted(run, finished_run)
    everything_is_kept(finished_run, make_config, tmp_path)


def test_an_orphan_that_was_mid_write_loses_its_file_to_the_resumed_run_and_takes_nothing_along(
    finished_run, copied_run, orphan, resume, make_config, tmp_path, name
):
    orphan.begin()
    assert len(temporary_files(copied_run)) == 1
    ended = []
    run = resume(lambda: ended.append(orphan.commit()))
    assert ended == [1], "what it wrote was swept: there is nothing to commit"
    assert_as_uninterrupted(run, finished_run)
    everything_is_kept(finished_run, make_config, tmp_path)


def test_an_orphan_that_commits_after_the_run_has_finished_changes_nothing(
    finished_run, orphan, resume, make_config, tmp_path, name
):
    run = resume(orphan.begin)
    assert len(temporary_files(run)) == 1, "it is still at it"
    assert [problem for stage in (name, "train") for problem in latest(run, stage).verify()] == []
    assert orphan.commit() == 0
    assert_as_uninterrupted(run, finished_run)
    everything_is_kept(finished_run, make_config, tmp_path)


def test_an_orphan_that_dies_after_the_run_has_finished_leaves_nothing_that_counts(
    finished_run, orphan, resume, make_config, tmp_path, name
):
    run = resume(orphan.begin)
    orphan.process.kill()
    orphan.process.join()
    assert orphan.process.exitcode == -signal.SIGKILL and len(temporary_files(run)) == 1
    assert latest(run, name).verify() == []
    everything_is_kept(finished_run, make_config, tmp_path)
