"""A signal ends a run politely: its exit code, what to do next, and nothing to do twice."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from pipeline.flow import run_flow
from pipeline.storage.run_directory import RunDirectory
from tests.flows.tiny import contents, shards_made

ROOT = Path(__file__).parent.parent

STOPS_AT_SHARD_1 = """
import sys, time
from pipeline.cli.app import main
from pipeline.stages.generate import Worker

work = Worker.__call__

def wait(self, task):
    if task.index == 1:
        print("waiting", flush=True)
        time.sleep(120)
    return work(self, task)

Worker.__call__ = wait
main()
"""


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=lambda value: str(value)
)
def test_a_signal_keeps_what_was_committed_and_the_same_command_continues(
    finished_run, make_settings, make_config, tmp_path, sent, code
):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(make_settings(tmp_path)))
    words = ["run", str(tmp_path / "run.yaml"), "--executor", "inline"]
    process = subprocess.Popen(
        [sys.executable, "-c", STOPS_AT_SHARD_1, *words], cwd=ROOT, stdout=-1, stderr=-1, text=True
    )
    assert any(line == "waiting\n" for line in process.stdout)
    process.send_signal(sent)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    if code > 0:
        stopped = said.splitlines()[-1]
        assert stopped.startswith("stopped: ") and sent.name in stopped and "the same command continues" in stopped
        assert "Traceback" not in said
    run = RunDirectory(tmp_path / "run")
    assert list(run.latest("generate").receipts()) == [0]
    run = run_flow(make_config(tmp_path), until="generate", executor="inline", console=Console(quiet=True))
    assert shards_made(run) == [("generate", index) for index in (1, 2, 3)]
    assert contents(run, "seeds", "generate") == contents(finished_run, "seeds", "generate")
