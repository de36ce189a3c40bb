"""Each command says what a person needs, and ends with the exit code that fits."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest

from pipeline.config.running import LimitsConfig
from tests.cli.tables import STAGES, line_of, one_paragraph, states
from tests.flows.tiny import run_again, stages_run


def test_a_signal_that_typer_would_take_for_its_own_is_told_too(command, finished_run, monkeypatch):
    monkeypatch.setattr(
        "pipeline.flow.statuses_of", lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    )
    ended = command("status", finished_run.path)
    assert ended.code == 143 and ended.err.startswith("stopped: Stopped (SIGTERM).")


def test_help_names_every_command(command):
    ended = command("--help")
    assert ended.code == 0
    for name in ("run", "plan", "status", "verify", "inspect", "chat", "push"):
        assert re.search(rf"\b{name}\b", ended.out), name
    assert command("run", "-h").code == 0


def test_the_version_is_the_installed_package_s(command):
    ended = command("--version")
    assert ended.code == 0 and ended.out == f"medusa-distill {version('medusa-distill')}\n"


def test_the_command_line_does_not_wait_for_torch():
    heavy = "{'torch', 'transformers', 'ray', 'vllm'} & sys.modules.keys()"
    code = f"import sys, pipeline.cli.app; print(sorted({heavy}))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


@pytest.mark.parametrize(
    "words", [(), ("rum",), ("run",), ("run", "--what"), ("status", "--deep", "x")]
)
def test_a_wrong_command_line_is_exit_code_2(command, words):
    ended = command(*words)
    assert ended.code == 2
    assert "Usage" in ended.out if not words else one_paragraph(ended.err).endswith("See --help.")


def test_verify_says_that_a_record_cannot_be_read(command, copied_run):
    record = copied_run.latest("export").path / "DONE.json"
    record.write_text((record.parent / "config.json").read_text())
    ended = command("verify", copied_run.path)
    assert ended.code == 1 and f"{record} is damaged" in ended.err.replace("\n", " ")


def test_keys_of_one_section_and_of_none(command):
    rows = command("keys", "limits").out.splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [
        f"limits.{name}" for name in LimitsConfig.model_fields
    ]
    ended = command("keys", "trian")
    assert ended.code == 2 and "no section 'trian'" in one_paragraph(ended.err)


def test_run_prints_one_line_per_stage_and_the_report(command, config_file):
    ended = command("run", config_file, "--executor", "inline")
    assert ended.code == 0, ended.err
    ticked = [line.split()[1] for line in ended.out.splitlines() if line.startswith("✓")]
    assert ticked == STAGES
    assert "Acceleration rate" in ended.out and "\x1b" not in ended.out
    again = command("run", config_file, "--executor", "inline")
    assert [line.split()[2] for line in again.out.splitlines() if line.startswith("✓")] == [
        "kept"
    ] * 7


def test_run_takes_overrides_until_and_fresh(command, config_file, copied_run):
    words = ("run", config_file, "--executor", "inline", "train.lr=2e-2")
    assert command(*words, "--until", "features").code == 0 and stages_run(copied_run) == []
    assert command(*words, "--until", "train").code == 0 and stages_run(copied_run) == ["train"]
    assert command(*words, "--until", "train", "--fresh", "train").code == 0 and stages_run(
        copied_run
    ) == ["train"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("train.num_haeds=3",), "did you mean 'train.num_heads'?"),
        (("--until", "trian"), "no stage 'trian'"),
        (("--executor", "slurm"), "no executor 'slurm'"),
        (("--until", "generate", "--fresh", "train"), "--fresh"),
    ],
)
def test_a_mistake_in_the_words_of_run_starts_nothing(command, config_file, tmp_path, words, says):
    ended = command(
        "run", config_file, *(("--executor", "inline") if "--executor" not in words else ()), *words
    )
    assert ended.code == 2 and says in one_paragraph(ended.err)
    assert not (tmp_path / "run").exists()


def test_a_yaml_error_of_many_lines_is_told_in_one(command, tmp_path):
    (tmp_path / "bad.yaml").write_text("run: {name: x\nseeds: [")
    ended = command("run", tmp_path / "bad.yaml")
    assert ended.code == 2 and "bad.yaml" in one_paragraph(ended.err)


def test_a_failed_check_is_exit_code_1_after_the_report(command, config_file, copied_run):
    ended = command("run", config_file, "check.min_acceleration_rate=9", "--executor", "inline")
    assert ended.code == 1 and "acceleration rate" in one_paragraph(ended.err)
    assert "check failed" in ended.out
    status = command("status", copied_run.path).out
    assert states(status) == dict.fromkeys(STAGES, "done") | {"check": "failed"}
    assert "is below check.min_acceleration_rate" in " ".join(line_of("check", status).split())
    planned = command("plan", config_file, "check.min_acceleration_rate=9").out
    assert states(planned)["check"] == "kept" and "below check.min" in planned


def test_push_hands_over_every_option(command, monkeypatch, tmp_path):
    asked = []

    def push_run(path, **options):
        asked.append((path, options))

    monkeypatch.setattr("pipeline.flow.push_run", push_run)
    unset = dict.fromkeys(("repo_id", "dataset", "base_model", "license"))
    assert command("push", tmp_path).code == 0
    assert asked.pop() == (tmp_path, unset | {"private": False, "dry_run": False})
    texts = {name: f"me/{name}" for name in unset}
    words = [word for name, text in texts.items() for word in (f"--{name.replace('_', '-')}", text)]
    assert command("push", tmp_path, *words, "--private").code == 0
    assert asked.pop() == (tmp_path, texts | {"private": True, "dry_run": False})
    assert command("push", tmp_path, "--dry-run").code == 0
    assert asked.pop() == (tmp_path, unset | {"private": False, "dry_run": True})


def test_status_of_a_finished_run(command, finished_run):
    ended = command("status", finished_run.path)
    assert ended.code == 0
    assert states(ended.out) == dict.fromkeys(STAGES, "done")
    generate = line_of("generate", ended.out)
    summary = finished_run.latest("generate").summary
    for part in ("4/4", str(summary["rows"]), f"{summary['tokens_per_second']:,.1f}", "generate-"):
        assert part in generate


def test_status_tells_partial_from_stale_from_never_run(command, copied_run):
    generate = copied_run.latest("generate")
    (generate.path / "DONE.json").unlink()
    generate.shard_path(1).unlink()
    shutil.rmtree(copied_run.latest("check").path)
    (copied_run.path / "latest/check").unlink()
    settings = (copied_run.path / "run.yaml").read_text()
    (copied_run.path / "run.yaml").write_text(settings.replace("nodes: 8", "nodes: 7"))
    found = states(command("status", copied_run.path).out)
    assert (found["seeds"], found["generate"], found["calibrate"]) == ("done", "partial", "stale")
    assert found["check"] == "not"
    assert "3/4" in line_of("generate", command("status", copied_run.path).out)


@pytest.mark.slow
def test_a_run_reads_as_it_lies_copied_elsewhere_without_its_target_and_seeds(
    command, make_config, tmp_path, tiny_target, tiny_seeds
):
    target, seeds = tmp_path / "target", tmp_path / "seeds.jsonl"
    shutil.copytree(tiny_target, target)
    shutil.copy(tiny_seeds, seeds)
    here = make_config(
        tmp_path / "here", target__model=str(target), seeds__sources=[{"path": str(seeds)}]
    )
    run = run_again(here)
    shutil.copytree(run.path, tmp_path / "there", symlinks=True)
    for path in (run.path, target):
        shutil.rmtree(path)
    seeds.unlink()
    there = tmp_path / "there"
    ended = command("status", there)
    assert ended.code == 0 and states(ended.out) == dict.fromkeys(STAGES, "done")
    assert command("verify", there).code == 0
    for stage in STAGES:
        ended = command("inspect", there, stage)
        assert ended.code == 0 and ended.out.strip(), (stage, ended.err)
    assert "<|assistant|>" in command("inspect", there, "generate").out


def test_a_run_with_a_store_reads_as_it_lies_when_both_were_copied(command, make_config, tmp_path):
    home = tmp_path / "home"
    config = make_config(home, run__store=str(home / "store"))
    run_again(config, until="generate")
    shutil.move(home, tmp_path / "moved")
    found = states(command("status", tmp_path / "moved/run").out)
    assert (found["seeds"], found["generate"], found["features"]) == ("done", "done", "not")
    assert command("verify", tmp_path / "moved/run").code == 0


def test_status_writes_nothing_into_a_run(command, copied_run):
    (copied_run.path / "digests.json").unlink()
    before = sorted(copied_run.path.rglob("*"))
    assert command("status", copied_run.path).code == 0
    assert sorted(copied_run.path.rglob("*")) == before


@pytest.mark.parametrize("name", ["status", "verify", "inspect", "push"])
def test_a_directory_that_is_no_run_is_named(command, tmp_path, name):
    words = [name, tmp_path, *(["seeds"] if name == "inspect" else [])]
    ended = command(*words)
    assert ended.code == 2 and "no run.yaml" in one_paragraph(ended.err)
    words[1] = tmp_path / "nothing"
    ended = command(*words)
    assert ended.code == 2 and "There is no such directory" in one_paragraph(ended.err)


def test_verify_of_a_whole_run_is_ok(command, finished_run):
    ended = command("verify", finished_run.path)
    assert ended.code == 0
    assert [line.split()[:2] for line in ended.out.splitlines()] == [
        ["ok", name] for name in (*STAGES, "splits")
    ]


def test_verify_names_what_is_damaged_and_its_advice_mends_it(command, copied_run, config_file):
    """A flipped bit in a shard's rows and one in the heads, which no file size shows; and a file
    that is gone.
    """
    shard = copied_run.latest("features").shard_path(1)
    heads = copied_run.path / "latest/train/heads.safetensors"
    tree = copied_run.path / "latest/calibrate/tree.json"
    for path in (shard, heads):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    tree.unlink()
    ended = command("verify", copied_run.path)
    assert ended.code == 1
    told = one_paragraph(ended.err)
    for path in (shard, heads.resolve(), tree.resolve()):
        assert str(path) in told
    assert [line.split()[:2] for line in ended.out.splitlines() if "damaged" in line] == [
        ["damaged", name] for name in ("features", "train", "calibrate")
    ]
    assert "Delete" in told
    shard.unlink()
    heads.unlink()
    assert command("run", config_file, "--executor", "inline").code == 0
    assert command("verify", copied_run.path).code == 0


@pytest.mark.parametrize("name", ["archive", "restore"])
def test_a_command_that_is_gone_is_refused(command, name):
    ended = command(name, "runs/my-7b", "s3://my-bucket")
    assert ended.code == 2 and name in one_paragraph(ended.err)
