"""Unfinished runs, and the check that a resumed run equals an uninterrupted one."""

from __future__ import annotations

import shutil

import yaml

from tests.flows.tiny import NUM_SEEDS, SHARDED, STAGES, contents, latest, quarantined, stored


def cut_before(run, stage):
    """Remove a stage and all later stages from a finished run."""
    for name in STAGES[STAGES.index(stage) :]:
        shutil.rmtree(latest(run, name).path)
        (run.path / "latest" / name).unlink()
    return run


def write_config(path, settings):
    path.write_text(yaml.safe_dump(settings))
    return path


def files_of(stage):
    """Return the bytes of a stage's shards and quarantine files."""
    found = (*stage.path.glob("shards/*"), *stage.path.glob("quarantine/*"))
    return {str(path.relative_to(stage.path)): path.read_bytes() for path in found}


def temporary_files(run):
    return list(run.path.rglob("*.tmp"))


def assert_as_uninterrupted(run, reference, stages=SHARDED):
    """Check that each id is there once, that bytes are equal, and that no file is left over."""
    given = [f"seeds:{row}" for row in range(NUM_SEEDS)]
    for name in stages:
        kept = [row["id"] for row in stored(latest(run, name))]
        refused = [row["id"] for row in quarantined(latest(run, name))]
        assert sorted(kept + refused) == sorted(given), "each id once"
        given = kept
        assert files_of(latest(run, name)) == files_of(latest(reference, name))
    assert contents(run, *stages) == contents(reference, *stages)
    reached = [stage for name in STAGES if (stage := run.latest(name))]
    assert [problem for stage in reached for problem in stage.verify()] == []
    assert temporary_files(run) == []
