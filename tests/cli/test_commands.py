"""Each command shows the run's state, and ends with the exit code that fits."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest

from pipeline.config.running import LimitsConfig
from tests.cli.tables import line_of, one_paragraph, states
from tests.flows.tiny import STAGES, latest, run_again, stored, write_lines

INLINE = ("--executor", "inline")


def test_a_signal_ends_a_command_with_its_own_exit_code(command, finished_run, monkeypatch):
    """Typer would handle the signal itself."""
    monkeypatch.setattr("pipeline.flow.statuses_of", lambda *_: signal.raise_signal(15))
    ended = command("status", finished_run.path)
    assert ended.code == 143 and ended.err.startswith("Stopped by SIGTERM.")


def test_verbose_version_has_what_a_report_needs(command):
    lines = command("--version", "--verbose").out.splitlines()
    assert lines[0] == f"medusa-distill {version('medusa-distill')}"
    assert f"torch {version('torch')}" in lines
    assert f"cores: {len(os.sched_getaffinity(0))}" in lines


def test_a_wrong_key_is_refused_before_torch_is_imported(config_file):
    """Nor transformers, Ray or vLLM."""
    assert heavy_imports(["--help"]) == "0 []\n"
    words = [
        ["run", f"{config_file}.gone"],
        ["run", str(config_file), "train.lrr=1"],
        ["plan", str(config_file), "train.lrr=1"],
        ["check", "heads", "--target", "model", "check.repeats=2"],
        ["chat", "heads", "target.typed=1"],
        ["serve", "heads", "target.typed=1"],
    ]
    assert heavy_imports(*words) == "2 []\n" * len(words)


def heavy_imports(*commands: list[str]) -> str:
    """The exit code and the heavy imports after each of these commands, in one process."""
    script = """
import sys, contextlib, os
from pipeline.cli.app import main
for words in COMMANDS:
    sys.argv[1:] = words
    try:
        with contextlib.redirect_stdout(open(os.devnull, "w")):
            main()
    except SystemExit as end:
        print(end.code, sorted({"torch", "transformers", "ray", "vllm"} & sys.modules.keys()))
"""
    script = script.replace("COMMANDS", repr(commands))
    return subprocess.check_output([sys.executable, "-c", script], text=True)


@pytest.mark.parametrize(
    "words",
    [(), ("rum",), ("run", "--what"), ("keys", "trian")],
)
def test_a_wrong_command_line_is_exit_code_2(command, words):
    ended = command(*words)
    assert ended.code == 2
    assert "Usage" in ended.out if not words else one_paragraph(ended.err)


def test_keys_of_one_section(command):
    rows = command("keys", "limits").out.splitlines()[2:]
    keys = [f"limits.{name}" for name in LimitsConfig.model_fields]
    assert [row.split("`")[1] for row in rows] == keys


def test_run_prints_one_line_per_stage_and_the_report(command, config_file):
    ended = command("run", config_file, *INLINE)
    assert ended.code == 0, ended.err
    ticked = [line.split()[1] for line in ended.out.splitlines() if line.startswith("✓")]
    assert ticked == STAGES
    assert "rows 40, train rows 24, calibrate rows 8, check rows 8" in line_of("✓", ended.out)
    assert not re.search(r"\d\.0(,|$)", ended.out, re.MULTILINE), "whole numbers of rows and tokens"
    assert "Acceleration rate" in ended.out and "\x1b" not in ended.out
    again = command("run", config_file, *INLINE).out
    kept = [line.split()[2] for line in again.splitlines() if line.startswith("✓")]
    assert kept == ["kept"] * 7


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("--until", "trian"), "--until"),
        (("--executor", "slurm"), "--executor"),
    ],
)
def test_a_mistake_in_the_words_of_run_starts_nothing(command, config_file, tmp_path, words, key):
    ended = command("run", config_file, *INLINE, *words)
    assert ended.code == 2 and key in one_paragraph(ended.err)
    assert not (tmp_path / "run").exists()


def test_a_failed_check_is_exit_code_1_after_the_report(command, config_file, copied_run):
    ended = command("run", config_file, "check.min_acceleration_rate=9", *INLINE)
    assert ended.code == 1 and "acceleration rate" in one_paragraph(ended.err)
    assert "Check failed" in ended.out
    assert "\n✓ export " in ended.out and "\n✗ check " in ended.out
    status = command("status", copied_run.path).out
    assert states(status) == dict.fromkeys(STAGES, "done") | {"check": "failed"}
    planned = command("plan", config_file, "check.min_acceleration_rate=9").out
    assert states(planned)["check"] == "kept"
    for out in (status, planned):
        assert "check.min_acceleration_rate" in line_of("check", out)


def test_status_and_verify_of_a_finished_run_write_nothing(command, copied_run):
    (copied_run.path / "digests.json").unlink()
    before = sorted(copied_run.path.rglob("*"))
    ended = command("status", copied_run.path)
    assert ended.code == 0 and states(ended.out) == dict.fromkeys(STAGES, "done")
    summary = copied_run.latest("generate").summary
    for part in ("4/4", str(summary["rows"]), f"{summary['tokens_per_second']:,.1f}"):
        assert part in line_of("generate", ended.out)
    ended = command("verify", copied_run.path)
    checked = [line.split()[:2] for line in ended.out.splitlines()]
    assert ended.code == 0 and checked == [["ok", name] for name in STAGES]
    assert sorted(copied_run.path.rglob("*")) == before


@pytest.mark.slow
def test_a_run_reads_elsewhere_without_target_and_seeds(
    command, make_config, tmp_path, tiny_target, tiny_seeds
):
    target, seeds = tmp_path / "target", tmp_path / "seeds.jsonl"
    shutil.copytree(tiny_target, target)
    shutil.copy(tiny_seeds, seeds)
    sources = {"target__model": str(target), "seeds__sources": [{"path": str(seeds)}]}
    run = run_again(make_config(tmp_path / "here", **sources))
    there = shutil.copytree(run.path, tmp_path / "there", symlinks=True)
    for path in (run.path, target):
        shutil.rmtree(path)
    seeds.unlink()
    ended = command("status", there)
    assert ended.code == 0 and states(ended.out) == dict.fromkeys(STAGES, "done")
    assert command("verify", there).code == 0
    for stage in STAGES:
        ended = command("inspect", there, stage)
        assert ended.code == 0 and ended.out.strip(), (stage, ended.err)
    assert "<|assistant|>" in command("inspect", there, "generate").out


@pytest.mark.parametrize("name", ["status", "verify", "inspect", "push"])
def test_a_directory_that_is_no_run_is_named(command, tmp_path, name):
    for path in (tmp_path, tmp_path / "nothing"):
        ended = command(name, path, *(["seeds"] if name == "inspect" else []))
        assert ended.code == 2 and str(path) in one_paragraph(ended.err)


def test_verify_names_damage_and_its_advice_mends_it(command, copied_run, config_file):
    """A bit in a shard's rows and one in the heads, which no file size shows; a lost file, a lost
    stage, and a record that cannot be read.
    """
    shard = latest(copied_run, "features").shard_path(1)
    heads = (copied_run.path / "latest/train/heads.safetensors").resolve()
    tree = (copied_run.path / "latest/calibrate/tree.json").resolve()
    record = latest(copied_run, "export").path / "DONE.json"
    gone = latest(copied_run, "check").path
    for path in (shard, heads):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    tree.unlink()
    record.write_text("{}")
    shutil.rmtree(gone)
    ended = command("verify", copied_run.path)
    refused = one_paragraph(ended.err)
    assert ended.code == 1
    for path in (shard, heads, tree, record, gone.name):
        assert str(path) in refused
    bad = [line.split()[1] for line in ended.out.splitlines() if line.startswith("damaged")]
    assert sorted(bad) == ["calibrate", "check", "export", "features", "train"]
    for path in (shard, heads, record):
        path.unlink()
    assert command("run", config_file, *INLINE).code == 0
    assert command("verify", copied_run.path).code == 0


@pytest.fixture
def half_done(copied_run):
    """Killed in features after three shards of four, one of them before its note was written."""
    features = latest(copied_run, "features")
    (features.path / "DONE.json").unlink()
    features.shard_path(3).unlink()
    for name in ("quarantine/00003.jsonl", "receipts/00003.json", "receipts/00002.json"):
        (features.path / name).unlink()
    for name in STAGES[3:]:
        shutil.rmtree(latest(copied_run, name).path)
        (copied_run.path / "latest" / name).unlink()
    return copied_run


def test_a_half_done_run_counts_what_is_there(command, half_done, config_file, monkeypatch):
    out, done = command("status", half_done.path).out, dict.fromkeys(STAGES[:2], "done")
    assert states(out) == done | {"features": "partial"} | dict.fromkeys(STAGES[3:], "not")
    features = latest(half_done, "features")
    rows = sum(receipt.num_rows for receipt in features.receipts().values())
    assert line_of("features", out).split()[1:5] == ["partial", "3/4", str(rows), "0"]
    ended = command("verify", half_done.path)
    assert ended.code == 0 and "3 shards, unfinished" in ended.out
    out = command("plan", config_file).out
    assert states(out) == dict.fromkeys(STAGES[:2], "kept") | dict.fromkeys(STAGES[2:], "run")
    assert "3 done, 1 pending" in line_of("features", out)
    assert "4 done " in line_of("generate", out)
    free = type("Usage", (), {"free": 100_000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    assert "do not fit" not in command("plan", config_file).out, "three quarters are there"
    assert "do not fit" in command("plan", config_file, "generate.temperature=1.5").out


def test_a_changed_setting_counts_no_shard_that_was_made_before(command, copied_run, config_file):
    out = command("plan", config_file, "generate.temperature=1.5").out
    line = line_of("features", out)
    assert " 4 pending" in line and "an upstream stage changed" in line and "done" not in line
    settings = (copied_run.path / "run.yaml").read_text()
    (copied_run.path / "run.yaml").write_text(settings.replace("nodes: 8", "nodes: 7"))
    assert states(command("status", copied_run.path).out)["calibrate"] == "stale"


def test_terminal_commands_in_rows_are_shown_and_not_obeyed(command, make_config, tmp_path):
    evil, forbidden = "\x1b[2J\x1b]0;mine\x07 and \x9b31m, then \x08\x08", set("\x1b\x07\x08\x9b")
    rows = [{"prompt": f"{number} {evil}"} for number in range(30)]
    source = {"path": write_lines(tmp_path / "evil.jsonl", *rows)}
    config = make_config(tmp_path, seeds__sources=[source])
    run = run_again(config, until="seeds")
    out = command("inspect", run.path, "seeds", "evil:7").out
    assert "7 ␛[2J␛]0;mine␇ and" in out and not set(out) & forbidden
    assert stored(run.latest("seeds"))[7]["messages"][0]["content"] == f"7 {evil}"
    (tmp_path / "evil.json").write_text(json.dumps([{evil: 1}]))
    source = f"seeds.sources={tmp_path / 'evil.json'}"
    ended = command("run", tmp_path / "run/run.yaml", source, *INLINE)
    assert ended.code == 3 and "␛[2J" in ended.err and not set(ended.err) & forbidden
