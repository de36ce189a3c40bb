"""`compare`: what differs between the runs of a sweep, what came of it, and what does not
compare.
"""

from __future__ import annotations

import json
import shutil

import pytest

from pipeline.artifacts.json_form import from_json
from pipeline.cli.compare import compared
from pipeline.report.comparison import ComparedRun, comparison
from pipeline.report.report import Report, TrainFigures
from tests.flows.tiny import NEW_TOKENS, latest, run_again


@pytest.fixture
def sweep(tmp_path, finished_run, make_config):
    """The finished run, one of two heads that stopped before its check, and one that was asked
    other questions.
    """
    places = {name: tmp_path / name for name in ("whole", "stopped", "asked-less")}
    for place in places.values():
        shutil.copytree(finished_run.path, place, symlinks=True)
    run_again(make_config(tmp_path, run__name="stopped", train__num_heads=2), until="calibrate")
    run_again(make_config(tmp_path, run__name="asked-less", check__prompts=6))
    return places


def test_runs_stand_side_by_side_with_what_differs_and_what_does_not_compare(
    command, sweep, finished_run
):
    ended = command("compare", *sweep.values())
    assert ended.code == 0, ended.err
    lines = {line[:30].strip(): line[30:].split("  ") for line in ended.out.splitlines()}
    rows = {name: [cell.strip() for cell in cells if cell.strip()] for name, cells in lines.items()}
    assert rows[""] == ["whole", "stopped", "asked-less"]
    assert rows["train.num_heads"] == ["3", "2", "3"] and rows["check.prompts"] == ["8", "8", "6"]
    assert not [name for name in rows if name.startswith(("run.", "seeds.", "generate."))], (
        "these are the same"
    )
    report = json.loads((finished_run.path / "report.json").read_text())
    native, trained = (
        report["check"]["native"],
        latest(finished_run, "train").path / "heads.safetensors",
    )
    rate = f"{native['acceleration_rate']:.2f} ± {native['standard_error']:.2f}"
    assert rows["acceleration rate, native"][:2] == [rate, "-"]
    assert rows["check"] == ["passed", "not run", "passed"]
    assert (
        rows["heads"][0]
        == rows["heads"][2]
        == f"{trained.stat().st_size / 1e6:.1f} MB"
        != rows["heads"][1]
    )
    assert len(rows["training"]) == len(rows["expected acceleration rate"]) == 3
    assert "stopped is unfinished: export, check." in ended.out
    assert "whole is unfinished" not in ended.out
    assert (
        "These runs were checked on different questions: their rates do not compare." in ended.out
    )


@pytest.mark.slow
def test_shorter_answers_are_other_questions(copied_run, finished_run, make_config, tmp_path):
    run_again(make_config(tmp_path, check__max_new_tokens=NEW_TOKENS - 1))
    shorter, whole = compared(copied_run.path), compared(finished_run.path)
    assert not shorter.unfinished and whole.questions and shorter.questions != whole.questions


def test_a_comparison_changes_nothing_and_needs_two_runs(command, copied_run):
    before = {path: path.lstat().st_mtime_ns for path in copied_run.path.rglob("*")}
    assert command("compare", copied_run.path, copied_run.path).code == 0
    assert {path: path.lstat().st_mtime_ns for path in copied_run.path.rglob("*")} == before
    ended = command("compare", copied_run.path)
    assert ended.code == 2 and "One run is no comparison" in ended.err
    ended = command("compare", copied_run.path, copied_run.path / "latest")
    assert ended.code == 2 and "no run directory" in ended.err


def test_a_run_whose_link_to_a_stage_leads_nowhere_is_unfinished(command, copied_run, finished_run):
    link = copied_run.path / "latest" / "train"
    link.unlink()
    link.symlink_to("nowhere")
    shutil.copytree(finished_run.path, whole := copied_run.path.with_name("whole"), symlinks=True)
    ended = command("compare", copied_run.path, whole)
    assert (
        ended.code == 0
        and "run is unfinished: train." in ended.out
        and "whole is unfinished" not in ended.out
    )


def test_other_machines_other_targets_and_speedups_beside_other_load_are_said():
    def run(name: str, cpu: str, target: str, overhead: float) -> ComparedRun:
        native = {
            "acceleration_rate": 2.0,
            "standard_error": 0.1,
            "overhead": overhead,
            "speedup": 2.0 / overhead,
            "greedy_match": {"sequences": 8, "identical": 8, "ties": 0},
        }
        report = {
            "target": target,
            "hardware": {"cpu": cpu},
            "check": {"passed": True, "failures": [], "native": native},
        }
        settings = {"train": {"lr": "auto"}}
        return ComparedRun(name, from_json(Report, report), settings, questions="the same")

    table, notes = comparison([run("a", "x", "t", 1.25), run("b", "y", "u", 0.8)])
    rows = {row[0]: row[1:] for row in table.rows}
    assert (
        rows["speedup, native"] == ("1.60x", "-")
        and rows["acceleration rate, native"] == ("2.00 ± 0.10",) * 2
    )
    assert [note.split(":")[0] for note in notes] == [
        "b",
        "These runs were checked on different machines",
        "These runs were of different targets",
    ]


def test_what_auto_has_chosen_stands_beside_it():
    def run(lr: object, chosen: float) -> ComparedRun:
        report = Report(train=TrainFigures(hyperparameters={"lr": chosen}))
        return ComparedRun(str(lr), report, {"train": {"lr": lr, "medusa": {"num_layers": 1}}})

    table, _ = comparison([run("auto", 0.003), run(0.01, 0.01)])
    assert table.rows[0] == ("train.lr", "auto (0.003)", "0.01")
    assert "train.medusa.num_layers" not in {row[0] for row in table.rows}
