"""A row that ends its worker's process is found by bisection, quarantined with the reason, and
costs no other row.
"""

from __future__ import annotations

import pytest
from rich.console import Console

from pipeline.flow import run_flow
from pipeline.stages import generate
from pipeline.storage.shards import read_rows
from tests.faults.unfinished import cut_before, kept, quarantined, temporary_files
from tests.faults.workers import Poisoned
from tests.flows.tiny import STAGES, last_events, latest, run_again, stages_run

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

# of a worker before its shard is searched, and of one that has a row alone before it is given up
DEATHS = 2


def rows_of(stage) -> list[dict]:
    return [row for path in stage.shards() for row in read_rows(path)]


def test_a_deadly_row_is_found_and_quarantined_and_the_run_finishes(
    finished_run, copied_run, make_config, tmp_path, monkeypatch
):
    before = latest(finished_run, "generate")
    poison = [row["id"] for row in rows_of(before) if row["split"] == "train"][-3]
    (tmp_path / "poison.txt").write_text(poison)
    (tmp_path / "finished.txt").write_text(str(before.path))
    cut_before(copied_run, "generate")
    monkeypatch.setattr(generate, "Worker", Poisoned)
    config = make_config(tmp_path, limits__max_consecutive_failures=DEATHS)
    run = run_flow(config, until="generate", console=Console(quiet=True))

    stage = latest(run, "generate")
    (refused,) = [row for row in quarantined(stage) if row not in quarantined(before)]
    assert (refused["id"], refused["reason"], refused["stage"]) == (
        poison,
        "killed-worker",
        "generate",
    )
    assert f"{DEATHS} times" in refused["detail"] and refused["row"]["id"] == poison
    assert rows_of(stage) == [row for row in rows_of(before) if row["id"] != poison], (
        "no other row is touched"
    )
    deaths = [event["shard"] for event in last_events(run) if event["event"] == "worker-died"]
    assert len(deaths) == DEATHS and len(set(deaths)) == 1
    assert not (stage.path / "isolation").exists()

    monkeypatch.undo()
    assert stages_run(run_again(config)) == ["features", "train", "calibrate", "export", "check"]
    assert poison not in kept(latest(run, "features")) and latest(run, "check").summary["passed"]
    assert (
        temporary_files(run) == []
        and [problem for name in STAGES for problem in latest(run, name).verify()] == []
    )
