"""The soak test finds lost and repeated rows, other bytes, and leftovers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.soak import differences
from pipeline.storage.run_directory import RunDirectory
from tests.flows.tiny import NUM_SEEDS, latest


@pytest.fixture
def found(finished_run, copied_run):
    def look(number: int = NUM_SEEDS) -> list[str]:
        return differences(copied_run, finished_run, {f"seeds:{row}" for row in range(number)})

    return look


def shard(run: RunDirectory, stage: str, index: int) -> Path:
    return latest(run, stage).shard_path(index)


def test_a_run_like_the_other_has_no_differences(found):
    assert found() == []


def test_lost_and_made_up_rows_are_found(found, copied_run):
    assert found(NUM_SEEDS + 2) == ["seeds lost 2 rows, seeds:40 among them"]
    assert found(NUM_SEEDS - 1) == ["seeds made up 1 rows, seeds:39 among them"]
    shard(copied_run, "features", 1).unlink()
    lost, missing, different = found()
    assert lost.startswith("features lost 10 rows, ")
    assert missing.endswith("00001.parquet is missing")
    assert different == "features: 00001.parquet differs from the undisturbed run's"


def test_rows_that_are_there_twice_are_found(found, copied_run):
    shutil.copy(shard(copied_run, "generate", 0), shard(copied_run, "generate", 4))
    assert "generate has rows twice" in found()
    shard(copied_run, "generate", 4).unlink()
    latest(copied_run, "generate").quarantine_path(2).write_text('{"id": "seeds:20"}\n')
    assert "generate has rows twice" in found()


def test_leftovers_are_found(found, copied_run):
    left = latest(copied_run, "generate").path / "shards" / "00001.parquet.0123456789ab.tmp"
    left.touch()
    assert found() == [f"{left} was left behind"]
