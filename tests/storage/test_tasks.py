"""A worker gets the rows that it has to do; those that kill it are quarantined."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pipeline.artifacts.seed_rows import SEEDS
from pipeline.storage.shards import ShardTask, read_rows, shard_writer, task_rows


@pytest.fixture
def task(tmp_path) -> ShardTask:
    """A task whose upstream shard holds the rows a to d."""
    shard, quarantine = str(tmp_path / "up.parquet"), str(tmp_path / "up.jsonl")
    made = ShardTask(0, "", "", shard, quarantine, "f")
    with shard_writer(made, SEEDS) as writer:
        writer.write([{"id": id, "split": "train", "messages": []} for id in "abcd"])
        writer.commit("seeds", None)
    return ShardTask(
        0, shard, "", str(tmp_path / "down.parquet"), str(tmp_path / "down.jsonl"), "f"
    )


def test_a_part_of_the_rows_without_the_killers_is_done(task):
    assert [row["id"] for row in task_rows(task)] == ["a", "b", "c", "d"]
    some = replace(task, rows=(1, 3), poison={"b": "killed"})
    assert [row["id"] for row in task_rows(some)] == ["c"]


def test_a_row_that_kills_its_worker_is_quarantined_with_how(task):
    task = replace(task, poison={"b": "signal 9"})
    with shard_writer(task, SEEDS) as writer:
        writer.write(task_rows(task))
        receipt = writer.commit("generate", "abcd")
    assert [row["id"] for row in read_rows(task.shard)] == ["a", "c", "d"]
    with open(task.quarantine) as file:
        (line,) = map(json.loads, file)
    assert (line["id"], line["detail"], line["row"]["id"]) == ("b", "signal 9", "b")
    assert receipt.reasons == {line["reason"]: 1}
