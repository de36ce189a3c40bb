"""Shards are retried, given up on and counted as the limits say, whatever the worker does."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from rich.console import Console

from pipeline.artifacts.seed_rows import SEEDS
from pipeline.conversations.conversation import Reason, RejectedRow
from pipeline.errors import DataError, EnvironmentFault, MedusaDistillError
from pipeline.execution.placement import Placement
from pipeline.execution.progress import ShardProgress
from pipeline.run.sharded import run_sharded
from pipeline.storage.shards import ShardTask, ShardWriter, read_rows
from pipeline.storage.stage_directory import StageDirectory
from tests.flows.tiny import context_of

ROWS = 10
CALLS: Counter[int] = Counter()


class Copier:
    """Copies a shard, refuses some of its rows, and fails as often as it is told to."""

    def __init__(
        self,
        progress: ShardProgress,
        refuse=0,
        reason=Reason.EMPTY,
        failures: dict[int, int] | None = None,
        error=None,
    ):
        self.refuse, self.reason, self.failures = refuse, reason, failures or {}
        self.progress = progress
        self.error = error or ZeroDivisionError("by\nzero")

    def __call__(self, task: ShardTask, upcoming=None):
        CALLS[task.index] += 1
        self.progress.begin(task)
        for number in range(1, ROWS + 1):
            self.progress.update(task, number, 2 * number, 2 * (ROWS - number))
        if CALLS[task.index] <= self.failures.get(task.index, 0):
            raise self.error
        rows = list(read_rows(task.source))
        with ShardWriter(task, SEEDS) as writer:
            for row in rows[: self.refuse]:
                writer.reject(RejectedRow(row["id"], self.reason, "", None))
            writer.write(rows[self.refuse :])
            return writer.commit(
                "copy", [row["id"] for row in rows], {"tokens": 7.0}, busy_seconds=0.5
            )


@pytest.fixture
def upstream(tmp_path) -> StageDirectory:
    stage = StageDirectory(tmp_path / "run", "seeds", "a" * 64)
    empty = {"source_id": None, "category": None, "split": "train", "messages": []}
    for index in range(3):
        with ShardWriter(stage.task(index), SEEDS) as writer:
            names = [f"s:{index * ROWS + number}" for number in range(ROWS)]
            writer.write([{"id": name, **empty} for name in names])
            writer.commit("seeds", names, {"calibrate_rows": 4.0})
    return stage


@pytest.fixture
def go(tmp_path, upstream, make_config):
    """Run the stage."""
    CALLS.clear()
    stage = StageDirectory(tmp_path / "run", "copy", "b" * 64)
    stage.create({})

    def run(limits: dict | None = None, split: str | None = None, **arguments):
        changes = {f"limits__{key}": value for key, value in (limits or {}).items()}
        console = Console(quiet=True)
        context, place = context_of(make_config(tmp_path, **changes), console=console), (1, 1, 0)
        worker = (Copier, arguments, Placement(*place))
        return run_sharded(context, stage, upstream, *worker, split=split)

    run.stage = stage
    return run


def test_totals_are_sums_and_rates_per_busy_second(go):
    totals = go(refuse=1)
    counts = {"rows": 27, "quarantined": 3, "reasons": {"empty": 3}, "tokens": 21.0}
    assert totals == {**counts, "tokens_per_second": 14.0}
    assert go() == totals and CALLS == {0: 1, 1: 1, 2: 1}, "a second call does nothing"


def test_a_shard_that_fails_too_often_ends_the_stage(go, tmp_path):
    """The other shards stay."""
    with pytest.raises(EnvironmentFault, match="Shard 1 of copy failed 3 times") as caught:
        go(failures={1: 99})
    assert "\n" not in str(caught.value) and CALLS[1] == 3
    assert sorted(go.stage.receipts()) == [0, 2]
    events = map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines())
    failed = [event["error"] for event in events if event["event"] == "shard-failed"]
    assert len(failed) == 3 and "Traceback" in failed[0]
    CALLS.clear()
    assert go()["rows"] == 30 and CALLS == {1: 1}


def test_shards_that_are_not_seen_from_here_end_the_stage(go, monkeypatch):
    """Their workers wrote to the disk of another node."""
    make = Copier.__call__

    def elsewhere(self, task, upcoming):
        receipt = make(self, task)
        task.shard.unlink()
        return receipt

    monkeypatch.setattr(Copier, "__call__", elsewhere)
    with pytest.raises(EnvironmentFault, match="does not see it"):
        go()
    assert CALLS == {0: 3, 1: 3, 2: 3}


def test_an_error_for_the_user_ends_the_stage_at_once(go):
    error = EnvironmentFault("No GPU.", "here", "Buy one.")
    with pytest.raises(MedusaDistillError) as caught:
        go(failures={0: 1}, error=error)
    assert caught.value is error and CALLS == {0: 1}


def test_too_much_quarantine_ends_the_stage_and_keeps_the_shards(go):
    for _ in range(2):
        with pytest.raises(DataError, match=r"9 of 30 rows were refused.*empty 9") as caught:
            go(refuse=3)
    assert caught.value.exit_code == 3 and sorted(go.stage.receipts()) == [0, 1, 2]
    assert go({"max_quarantine_fraction": 0.3}, refuse=3)["rows"] == 21
    assert CALLS == {0: 1, 1: 1, 2: 1}


def test_a_nearly_full_disk_keeps_the_finished_shards(go):
    with pytest.raises(EnvironmentFault, match=r"limits\.min_free_disk_gb = 1000000000"):
        go({"min_free_disk_gb": 1e9})
    assert sorted(go.stage.receipts()) == [0]
    assert go()["rows"] == 30 and CALLS == {0: 1, 1: 1, 2: 1}


def test_shards_that_upstream_no_longer_has_are_dropped(go, upstream):
    go()
    upstream.shard_path(2).unlink()
    assert go()["rows"] == 20
    assert [path.stem for path in go.stage.shards()] == ["00000", "00001"]
