"""Each thing that a machine can lack: its exit code, one paragraph that says what to do, nothing
lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pipeline.cli.app import app
from pipeline.cli.ending import ends_well
from pipeline.errors import EnvironmentFault
from pipeline.flow import STAGES
from pipeline.storage.run_directory import RunDirectory
from tests.flows.failing import committed
from tests.flows.tiny import SHARDED, contents, latest, run_again, stages_run

pytest_plugins = ["tests.flows.failing"]


def test_a_target_that_the_hub_cannot_be_asked_for(intact, run_fails):
    said = run_fails(4, target__model="nobody/nothing")
    assert "nobody/nothing" in said and "local directory" in said


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


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # TensorBoard's own thread
@pytest.mark.parametrize(
    ("stage", "left"),
    [
        *(
            (name, 0)
            for name in ("seeds", "generate", "features", "train", "calibrate", "export", "check")
        ),
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
    before_it = [
        name for name in list(STAGES)[: list(STAGES).index(stage)] if finished_run.latest(name)
    ]
    run = RunDirectory(small_disk / "run")
    run.path.mkdir()
    for name in before_it:
        shutil.copytree(
            finished_run.latest(name).path, run.path / finished_run.latest(name).path.name
        )
    before = committed(run)
    real = STAGES[stage].run

    def run_on_a_full_disk(*arguments):
        fill_up(small_disk, left)
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setitem(STAGES, stage, replace(STAGES[stage], run=run_on_a_full_disk))
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
    assert (
        "The disk is full" in said
        and "00002.parquet" in said
        and "continues where it stopped" in said
    )
    run = RunDirectory(tmp_path / "run")
    assert sorted(run.latest("generate").receipts()) == [0, 1] and not list(run.path.rglob("*.tmp"))


def test_too_little_room_is_told_before_the_disk_is_full(intact, run_fails):
    said = run_fails(4, "limits.min_free_disk_gb=1000000000", "generate.temperature=0.5")
    assert "limits.min_free_disk_gb" in said and "continues" in said


@pytest.mark.parametrize("stage", ["generate", "features", "train"])
def test_a_gpu_that_is_not_there(intact, run_fails, monkeypatch, stage):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    changed = {
        "generate": "generate.temperature=0.6",
        "features": "features.codec=lz4",
        "train": "train.lr=0.5",
    }
    said = run_fails(4, f"placement.{stage}.gpus_per_worker=1", changed[stage])
    assert "GPU" in said and f"placement.{stage}" in said


def test_a_result_that_cannot_be_made_here_again_is_not_thrown_away(
    copied_run, make_config, tmp_path, monkeypatch
):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = make_config(tmp_path, placement__train={"gpus_per_worker": 1})
    trained = latest(copied_run, "train").path / "heads.safetensors"
    before = trained.read_bytes()
    assert stages_run(run_again(config)) == []
    with pytest.raises(EnvironmentFault, match=r"placement\.train"):
        run_again(config, fresh="train")
    assert trained.read_bytes() == before


@pytest.mark.parametrize(
    "word",
    [
        "generate.engine=vllm",
        "features.engine=vllm",
        pytest.param(
            "check.engines=[native, vllm]", marks=pytest.mark.slow
        ),  # in a process of its own
    ],
)
def test_vllm_that_cannot_be_imported(intact, run_fails, tmp_path, monkeypatch, word):
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open\\nshared object file')"
    )
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))  # for the check's own process
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    said = run_fails(4, word)
    assert "vLLM is not importable" in said and "libcudart" in said and "Install" in said


def test_a_run_root_that_cannot_be_made(run_fails, tmp_path):
    (tmp_path / "file").write_text("")
    said = run_fails(4, run__root=str(tmp_path / "file" / "runs"))
    assert "cannot be made" in said and "run.root" in said
