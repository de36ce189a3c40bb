"""Each way that input or machine can be wrong: its exit code, one paragraph that says what to do, nothing lost.

The flow is run as the command runs it, beside a finished run whose every byte must be as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from pipeline.cli.app import app, ends_well
from pipeline.flow import STAGES
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.shards import read_rows
from tests.flows.tiny import CONTEXT, contents, save_seeds, save_target, stages_run

SHARDED = ("seeds", "generate", "features")

Run = Callable[..., str]


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    handlers = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    yield
    for name, handler in handlers.items():
        signal.signal(name, handler)


@pytest.fixture
def run_fails(tmp_path, make_settings, capsys) -> Run:
    """`run_fails(code, *words, **changes)`: the paragraph that `run` ends with."""

    def fail(code: int, *words: str, **changes: object) -> str:
        (tmp_path / "bad.yaml").write_text(yaml.safe_dump(make_settings(tmp_path, **changes)))
        capsys.readouterr()
        line = ["run", str(tmp_path / "bad.yaml"), "--executor", "inline", *words]
        ended = ends_well(lambda: app(line, standalone_mode=False))
        said = capsys.readouterr().err
        assert ended == code, said
        return one_paragraph(said)

    return fail


def one_paragraph(said: str) -> str:
    told = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(told) == 1 and "Traceback" not in said and len(told[0]) < 700, said
    assert said.rstrip().endswith(told[0].rstrip()), "it is the last that is said"
    return told[0].removeprefix("error: ")


def committed(run: RunDirectory) -> dict[str, bytes]:
    """Every file of every stage that was finished."""
    stages = [path.parent for path in run.path.glob("*/DONE.json")]
    return {
        str(file.relative_to(run.path)): file.read_bytes()
        for stage in stages
        for file in stage.rglob("*")
        if file.is_file() and file.name not in ("lock", "upstream.json", "DONE.json", "README.md")
    }


@pytest.fixture
def intact(copied_run) -> Iterator[RunDirectory]:
    """A finished run; when the test is over, all of it is still there, and still whole."""
    before = committed(copied_run)
    assert before
    yield copied_run
    after = committed(copied_run)
    assert {name: after.get(name) for name in before} == before


def test_an_unknown_configuration_key_is_named_with_the_nearest(intact, run_fails):
    said = run_fails(2, train__num_haeds=3)
    assert "there is no key 'train.num_haeds'; did you mean 'train.num_heads'?" in said
    assert "did you mean 'calibrate.nodes'" in run_fails(2, "calibrate.node=3")


def test_a_target_directory_that_is_not_there(intact, run_fails, tmp_path):
    said = run_fails(2, target__model=str(tmp_path / "absent"))
    assert str(tmp_path / "absent") in said and "target.model" in said


def test_a_target_that_the_hub_cannot_be_asked_for(intact, run_fails):
    said = run_fails(4, target__model="nobody/nothing")
    assert "nobody/nothing" in said and "local directory" in said


def test_a_target_without_a_chat_template(intact, run_fails, tmp_path):
    said = run_fails(2, target__model=str(save_target(tmp_path / "plain", template=None)))
    assert "no chat template" in said and "target.chat_template" in said


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "mamba"),
        (
            {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 4},
            "linear_attention",
        ),
    ],
)
def test_a_target_whose_layers_cannot_verify_a_tree(intact, run_fails, tmp_path, tiny_target, config, why):
    target = tmp_path / "recurrent"
    shutil.copytree(tiny_target, target)
    (target / "config.json").write_text(json.dumps(config))
    said = run_fails(2, target__model=str(target))
    assert "cannot verify a tree" in said and why in said and "Llama" in said


def test_a_head_count_that_the_export_cannot_carry(intact, run_fails):
    said = run_fails(2, "train.num_heads=129")
    assert "129 heads" in said and "128" in said and "train.num_heads" in said
    assert stages_run(intact)[0] == "seeds", "nothing was started"


def test_a_parquet_shard_from_another_run(intact, run_fails, make_settings, tmp_path, capsys):
    run_fails(1, "check.min_acceleration_rate=9", "generate.temperature=1.5", "run.name=other")
    other = RunDirectory(tmp_path / "other")
    foreign = intact.latest("features").shard_path(7)
    shutil.copy(other.latest("features").shard_path(0), foreign)
    said = run_fails(3, "train.lr=0.5")
    assert "another run" in said and str(foreign) in said and "Delete this file" in said
    foreign.unlink()


@pytest.mark.parametrize("text", ["", "\n\n", "[]"])
def test_an_empty_seed_file(intact, run_fails, tmp_path, text):
    (tmp_path / "empty.jsonl").write_text(text)
    said = run_fails(3, f"seeds.sources={tmp_path / 'empty.jsonl'}")
    assert "empty.jsonl" in said and "Expected" in said


def test_a_seed_file_that_is_no_conversation_data(intact, run_fails, tmp_path):
    (tmp_path / "table.json").write_text(json.dumps([{"price": 3}, {"price": 4}]))
    said = run_fails(3, f"seeds.sources={tmp_path / 'table.json'}")
    assert "price" in said and "Expected" in said


def test_a_conversation_longer_than_the_context_is_quarantined_and_the_run_goes_on(tmp_path, make_config, tiny_seeds):
    from rich.console import Console

    from pipeline.flow import run_flow

    long = {"conversations": [{"from": "human", "value": "moon river " * CONTEXT}, {"from": "gpt", "value": "no"}]}
    (tmp_path / "seeds.jsonl").write_text(json.dumps(long) + "\n" + tiny_seeds.read_text())
    config = make_config(tmp_path, seeds__sources=[{"path": str(tmp_path / "seeds.jsonl")}])
    run = run_flow(config, executor="inline", console=Console(quiet=True))
    stage = run.latest("generate")
    refused = [json.loads(line) for line in stage.quarantine_path(0).read_text().splitlines()]
    assert ("seeds:0", "too-long") in [(row["id"], row["reason"]) for row in refused]
    assert stage.summary["reasons"]["too-long"] == 1 and run.latest("check").summary["passed"]
    rows = [row for path in stage.shards() for row in read_rows(path)]
    assert max(len(row["input_ids"]) for row in rows) <= CONTEXT


def test_nothing_but_conversations_longer_than_the_context(intact, run_fails, tmp_path):
    rows = [{"prompt": f"{number} " + "moon river " * CONTEXT} for number in range(30)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = run_fails(3, f"seeds.sources={tmp_path / 'long.jsonl'}")
    assert "refused" in said and "too-long" in said and "limits.max_quarantine_fraction" in said


@pytest.mark.parametrize("size", [290, 310])
def test_heads_of_another_vocabulary_than_the_target_s(copied_run, run_fails, size):
    import torch
    from safetensors.torch import load_file, save_file

    heads = copied_run.path / "latest/train/heads.safetensors"
    tensors = load_file(heads)
    header = json.dumps({"hidden_size": 64, "vocab_size": size, "num_heads": 3, "num_layers": 1, "tied": False})
    summary = json.dumps(copied_run.latest("train").summary)
    for name in [name for name in tensors if name.endswith(".1.weight")]:
        tensors[name] = torch.zeros(size, 64)
    save_file(tensors, heads, {"heads": header, "summary": summary})
    before = contents(copied_run, *SHARDED)
    said = run_fails(3)
    assert str(size) in said and "vocabulary" in said
    assert contents(copied_run, *SHARDED) == before


def test_a_target_whose_lm_head_is_not_what_its_configuration_says(intact, run_fails, tmp_path, tiny_target):
    target = tmp_path / "resized"
    shutil.copytree(tiny_target, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": 320}))
    said = run_fails(2, target__model=str(target))
    assert str(target) in said


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 3 MB; where none may be mounted, there is nothing to test on."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = os.geteuid() == 0 and shutil.which("mount")
    words = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(directory)]
    if not mounted or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill_up(directory: Path, left: int) -> None:
    """Take all of a disk but so many bytes."""
    with (directory / "ballast").open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(file.tell() - left)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
@pytest.mark.parametrize(
    ("stage", "left"),
    [
        *((name, 0) for name in ("seeds", "generate", "features", "train", "calibrate", "export", "check")),
        ("generate", 16_384),
        ("features", 65_536),
        ("train", 65_536),
        ("export", 65_536),
    ],
)
def test_a_full_disk_stops_in_any_stage_and_the_same_command_goes_on_when_there_is_room(
    small_disk, finished_run, run_fails, make_settings, monkeypatch, stage, left
):
    """The stages before are there already; the disk fills up as this one starts."""
    before_it = list(STAGES)[: list(STAGES).index(stage)]
    run = RunDirectory(small_disk / "run")
    run.path.mkdir()
    for name in before_it:
        shutil.copytree(finished_run.latest(name).path, run.path / finished_run.latest(name).path.name)
    before = committed(run)
    real = STAGES[stage].run

    def run_on_a_full_disk(*arguments):
        fill_up(small_disk, left)
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(STAGES[stage], "run", run_on_a_full_disk)
        said = run_fails(4, run__root=str(small_disk))
    assert "run the same command again" in said.lower() or "run again" in said
    assert "disk" in said
    assert not list(run.path.rglob("*.tmp"))
    assert {name: data for name, data in committed(run).items() if name in before} == before
    (small_disk / "ballast").unlink()
    (small_disk.parent / "good.yaml").write_text(yaml.safe_dump(make_settings(small_disk)))
    words = ["run", str(small_disk.parent / "good.yaml"), "--executor", "inline"]
    assert ends_well(lambda: app(words, standalone_mode=False)) == 0
    assert stages_run(run)[0] == stage
    assert contents(run, *SHARDED) == contents(finished_run, *SHARDED)


def test_a_disk_that_is_full_for_every_single_file(tmp_path, run_fails, monkeypatch):
    """Where no file system can be mounted, the same from the system call itself."""
    real = os.replace

    def full(source: str, destination: str) -> None:
        if str(destination).endswith("00002.parquet") and "generate-" in str(destination):
            raise OSError(28, "No space left on device")
        real(source, destination)

    monkeypatch.setattr(os, "replace", full)
    said = run_fails(4)
    assert "The disk is full" in said and "00002.parquet" in said and "continues where it stopped" in said
    run = RunDirectory(tmp_path / "run")
    assert sorted(run.latest("generate").receipts()) == [0, 1] and not list(run.path.rglob("*.tmp"))


def test_too_little_room_is_told_before_the_disk_is_full(intact, run_fails):
    said = run_fails(4, "limits.min_free_disk_gb=1000000000", "generate.temperature=0.5")
    assert "limits.min_free_disk_gb" in said and "continues" in said


@pytest.mark.parametrize("stage", ["generate", "features", "train"])
def test_a_gpu_that_is_not_there(intact, run_fails, monkeypatch, stage):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    changed = {"generate": "generate.temperature=0.6", "features": "features.codec=lz4", "train": "train.lr=0.5"}
    said = run_fails(4, f"placement.{stage}.gpus_per_worker=1", changed[stage])
    assert "GPU" in said and f"placement.{stage}" in said


@pytest.mark.parametrize("word", ["generate.engine=vllm", "features.engine=vllm", "check.engines=[native, vllm]"])
def test_vllm_that_cannot_be_imported(intact, run_fails, tmp_path, monkeypatch, word):
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open\\nshared object file')")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))  # for the check's own process
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    said = run_fails(4, word)
    assert "vLLM is not importable" in said and "libcudart" in said and "Install" in said


def test_a_run_root_that_cannot_be_made(run_fails, tmp_path):
    (tmp_path / "file").write_text("")
    said = run_fails(4, run__root=str(tmp_path / "file" / "runs"))
    assert "cannot be made" in said and "run.root" in said


def test_seeds_that_are_not_there(run_fails, tmp_path):
    said = run_fails(2, seeds__sources=[{"path": str(tmp_path / "absent.jsonl")}])
    assert "absent.jsonl" in said and "seeds.sources" in said


def test_few_seeds(run_fails, tmp_path):
    said = run_fails(3, seeds__sources=[{"path": str(save_seeds(tmp_path / "few.jsonl", 9))}])
    assert "9 usable conversations are too few" in said
