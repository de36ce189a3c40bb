"""A run that stops before a stage, and the proof that a resumed one ends as if nothing had ever
happened.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.shards import read_rows
from pipeline.storage.stage_directory import StageDirectory
from tests.flows.tiny import NUM_SEEDS, SHARDED, STAGES, contents, latest


def cut_before(run: RunDirectory, stage: str) -> RunDirectory:
    """Take this stage and all that follow it out of a finished run."""
    for name in STAGES[STAGES.index(stage) :]:
        shutil.rmtree(latest(run, name).path)
        (run.path / "latest" / name).unlink()
    return run


def write_config(path: Path, settings: dict[str, object]) -> Path:
    path.write_text(yaml.safe_dump(settings))
    return path


def kept(stage: StageDirectory) -> list[str]:
    """The ids of the rows of all shards; one that stands twice is there twice."""
    return [row["id"] for path in stage.shards() for row in read_rows(path, ["id"])]


def quarantined(stage: StageDirectory) -> list[dict[str, Any]]:
    """The rows of all quarantine files."""
    paths = sorted((stage.path / "quarantine").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def files_of(stage: StageDirectory) -> dict[str, bytes]:
    """The bytes of its shards and quarantine files."""
    found = (*stage.path.glob("shards/*"), *stage.path.glob("quarantine/*"))
    return {str(path.relative_to(stage.path)): path.read_bytes() for path in found}


def temporary_files(run: RunDirectory) -> list[Path]:
    return list(run.path.rglob("*.tmp"))


def assert_as_uninterrupted(
    run: RunDirectory, reference: RunDirectory, stages: tuple[str, ...] = SHARDED
) -> None:
    """Every id once, every shard the same to the byte, nothing left over, nothing damaged."""
    given = [f"seeds:{row}" for row in range(NUM_SEEDS)]
    for name in stages:
        refused = [row["id"] for row in quarantined(latest(run, name))]
        assert sorted(kept(latest(run, name)) + refused) == sorted(given), "each id once"
        given = kept(latest(run, name))
        assert files_of(latest(run, name)) == files_of(latest(reference, name))
    assert contents(run, *stages) == contents(reference, *stages)
    reached = [stage for name in STAGES if (stage := run.latest(name))]
    assert [problem for stage in reached for problem in stage.verify()] == []
    assert temporary_files(run) == []
