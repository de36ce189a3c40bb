"""`compare`: what differs between the runs of a sweep, what came of it, and what does not
compare.
"""

from __future__ import annotations

import shutil

import pytest

from pipeline.artifacts.json_form import from_json
from pipeline.report.comparison import ComparedRun, compare_runs
from pipeline.report.report import Report, TrainFigures
from tests.flows.tiny import report_of, run_again


@pytest.fixture
def sweep(tmp_path, finished_run, make_config):
    """The finished run, one of two heads without a check, and one with fewer questions."""
    places = {name: tmp_path / name for name in ("whole", "stopped", "asked-less")}
    for place in places.values():
        shutil.copytree(finished_run.path, place, symlinks=True)
    two = {"train__num_heads": 2, "calibrate__draft_tokens": 2}
    run_again(make_config(tmp_path, run__name="stopped", **two), until="calibrate")
    run_again(make_config(tmp_path, run__name="asked-less", check__prompts=6))
    return places


def test_runs_stand_side_by_side(command, sweep, finished_run):
    """The table has settings that differ, and figures that do not compare."""
    ended = command("compare", *sweep.values())
    assert ended.code == 0, ended.err
    rows = {}
    for line in ended.out.splitlines():
        rows[line[:30].strip()] = [cell.strip() for cell in line[30:].split("  ") if cell.strip()]
    assert rows[""] == ["whole", "stopped", "asked-less"]
    assert rows["train.num_heads"] == ["3", "2", "3"] and rows["check.prompts"] == ["8", "8", "6"]
    assert not [name for name in rows if name.startswith(("run.", "seeds.", "generate."))]
    native = report_of(finished_run)["check"]["native"]
    rate = f"{native['acceleration_rate']:.2f} ± {native['standard_error']:.2f}"
    assert rows["acceleration rate, native"][:2] == [rate, "-"]
    assert rows["check"] == ["passed", "not run", "passed"]
    assert rows["draft tokens of its own chain"] == ["3", "2", "3"]
    assert len(rows["expected, equal chain (2)"]) == 3
    assert any(name.startswith("expected, equal tree") for name in rows)
    assert len(rows["training"]) == len(rows["expected, its own tree"]) == 3
    assert "stopped is unfinished: export, check." in ended.out
    assert "whole is unfinished" not in ended.out
    assert "different questions" in ended.out
    assert command("compare", finished_run.path).code == 2


def compared_run(name: str, cpu: str, target: str, overhead: float) -> ComparedRun:
    native = {"acceleration_rate": 2.0, "standard_error": 0.1}
    native |= {"overhead": overhead, "speedup": 2.0 / overhead}
    native["greedy_match"] = {"sequences": 8, "identical": 8, "ties": 0, "tokens": 2048}
    check = {"passed": target == "t", "failures": [], "native": native}
    report = from_json(Report, {"target": target, "hardware": {"cpu": cpu}, "check": check})
    return ComparedRun(name, report, {"train": {"lr": "auto"}}, questions="the same")


def test_other_machines_targets_and_load_are_named():
    runs = [compared_run("a", "x", "t", 1.25), compared_run("b", "y", "u", 0.8)]
    table, notes = compare_runs(runs)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["speedup, native"] == ("1.60x", "-"), "faster than plain decoding: other load"
    assert rows["acceleration rate, native"] == ("2.00 ± 0.10",) * 2
    assert rows["check"] == ("passed", "failed")
    assert len(notes) == 3 and notes[0].startswith("b:")
    assert "machines" in notes[1] and "targets" in notes[2]


def calibrated(name: str, nodes: int, rate: float, chain: list[float]) -> ComparedRun:
    """A run with a tree of 3 nodes or fewer, and chains of 1, 2, … draft tokens, all drafted."""
    tree = {"nodes": nodes, "depth": 1}
    tree |= {"answers": 9, "seen_share": 0.0, "new": {"answers": 9}}
    tree |= {"expected_acceleration_rate": rate, "num_speculative_tokens": len(chain)}
    tree["sizes"] = [{"nodes": 1, "expected_acceleration_rate": chain[0]}]
    tree["chain"] = [
        {"draft_tokens": number, "expected_acceleration_rate": of, "new": {"answers": 9}}
        for number, of in enumerate(chain, start=1)
    ]
    return ComparedRun(name, from_json(Report, {"tree": tree}), {})


def test_rates_are_compared_at_an_equal_chain_and_tree():
    """Two draft tokens beside one: at their own sizes the order is the other way round."""
    runs = [calibrated("two", 2, 1.28, [1.17, 1.28]), calibrated("one", 1, 1.21, [1.21])]
    runs.append(ComparedRun("none", Report(), {}))
    table, _ = compare_runs(runs)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["nodes of its own tree"] == ("2", "1", "-")
    assert rows["draft tokens of its own chain"] == ("2", "1", "-")
    assert rows["expected, its own tree"] == ("1.28", "1.21", "-")
    assert rows["expected, equal tree (1)"] == ("1.17", "1.21", "-")
    assert rows["expected, equal chain (1)"] == ("1.17", "1.21", "-")


def test_what_auto_has_chosen_is_shown():
    def run(lr: object, chosen: float) -> ComparedRun:
        report = Report(train=TrainFigures(hyperparameters={"lr": chosen}))
        return ComparedRun(str(lr), report, {"train": {"lr": lr, "medusa": {"num_layers": 1}}})

    table, _ = compare_runs([run("auto", 0.003), run(0.01, 0.01)])
    assert table.rows[0] == ("train.lr", "auto (0.003)", "0.01")
    assert "train.medusa.num_layers" not in {row[0] for row in table.rows}
