"""Through Ray and Ray Train the flow makes what it makes in one process, and stops as politely."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from pipeline.flow import run_flow
from pipeline.storage.run_directory import RunDirectory
from tests.flows.tiny import contents, last_events, shards_made

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_a_ray_run_is_stopped_by_sigterm_and_goes_on_to_what_the_inline_run_made(
    finished_run, make_settings, make_config, tmp_path
):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(make_settings(tmp_path)))
    command = [sys.executable, "-m", "pipeline.cli", "run", str(tmp_path / "run.yaml")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    run = RunDirectory(tmp_path / "run")
    patience = time.monotonic() + 300
    while not ((run.path / "events.jsonl").exists() and ("generate", 0) in shards_made(run)):
        assert process.poll() is None and time.monotonic() < patience
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143, said
    assert "stopped: Stopped (SIGTERM)" in said and "the same command continues" in said and "Traceback" not in said
    assert "run-finished" not in {event["event"] for event in last_events(run)}

    stopped_with = {("generate", index) for index in run.latest("generate").receipts()}
    assert stopped_with
    run = run_flow(make_config(tmp_path), console=Console(quiet=True))
    assert not stopped_with & set(shards_made(run))
    assert contents(run, "seeds", "generate", "features") == contents(finished_run, "seeds", "generate", "features")
    ours, theirs = (load_file(of.path / "latest/train/heads.safetensors") for of in (run, finished_run))
    assert all(torch.allclose(ours[name], tensor, atol=1e-5) for name, tensor in theirs.items())
    assert run.latest("check").summary["passed"]
    assert all(run.latest(name).verify() == [] for name in ("generate", "features", "train", "export"))
