"""A worker gets the rows that it has to do; those that kill it are quarantined."""

from __future__ import annotations

import json
from dataclasses import replace

from pipeline.artifacts.seed_rows import SEEDS
from pipeline.storage.shards import ShardTask, ShardWriter, read_rows, task_rows
from tests.storage.rows import seed_row, write_shard


def test_tasks_take_a_row_range_and_quarantine_crashing_rows(tmp_path):
    source, shard, quarantine = tmp_path / "a" / "up", tmp_path / "down", tmp_path / "down.jsonl"
    write_shard(source, [seed_row(name) for name in "abcd"])
    task = ShardTask(0, shard, quarantine, "f", source)
    assert [row["id"] for row in task_rows(task)] == ["a", "b", "c", "d"]
    task = replace(task, crashing={"b": "signal 9"})
    assert [row["id"] for row in task_rows(replace(task, rows=(1, 3)))] == ["c"]
    with ShardWriter(task, SEEDS) as writer:
        writer.write(task_rows(task))
        receipt = writer.commit("generate", "acd")
    assert [row["id"] for row in read_rows(shard)] == ["a", "c", "d"]
    line = json.loads(quarantine.read_text())
    assert (line["id"], line["detail"], line["row"]["id"]) == ("b", "signal 9", "b")
    assert receipt.reasons == {line["reason"]: 1}
