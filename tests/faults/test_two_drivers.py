"""A second driver of a run is refused while the first one lives."""

from __future__ import annotations

import os
import signal
import socket

import pytest
import yaml

from pipeline.cli.app import app
from pipeline.cli.ending import ends_well
from pipeline.storage.run_directory import RunDirectory
from tests.faults.processes import Waiting
from tests.flows.failing import one_paragraph
from tests.flows.tiny import contents, run_again, shards_made, stages_run

pytest_plugins = ["tests.flows.failing"]


@pytest.mark.fault
def test_a_second_driver_takes_over_only_from_a_dead_one(
    finished_run, make_settings, tmp_path, capsys, signals_as_they_were
):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(make_settings(tmp_path)))
    words = ["run", str(tmp_path / "run.yaml"), "--executor", "inline", "--until", "generate"]
    first = Waiting(tmp_path / "run.yaml", tmp_path / "said.txt", "generate")
    try:
        assert first.is_at("generate")
        run = RunDirectory(tmp_path / "run")
        events, settings = ((run.path / name).read_bytes() for name in ("events.jsonl", "run.yaml"))
        capsys.readouterr()
        for line in (words, [*words, "generate.temperature=1.5", "--fresh", "seeds"]):
            assert ends_well(lambda line=line: app(line, standalone_mode=False)) == 4
            said = one_paragraph(capsys.readouterr().err)
            assert f"process {first.process.pid} on {socket.gethostname()}" in said
        store = [*words, "run.name=other", f"run.store={run.path}", "--fresh", "generate"]
        assert ends_well(lambda: app(store, standalone_mode=False)) == 4
        assert f"process {first.process.pid} on" in one_paragraph(capsys.readouterr().err)
        # reading is free
        assert ends_well(lambda: app(["status", str(run.path)], standalone_mode=False)) == 0
        assert (run.path / "events.jsonl").read_bytes() == events
        assert (run.path / "run.yaml").read_bytes() == settings
    finally:
        first.send(signal.SIGKILL)
        ended, _ = first.end()
    assert ended == -signal.SIGKILL
    assert ends_well(lambda: app(words, standalone_mode=False)) == 0
    assert shards_made(run) == [("generate", index) for index in (1, 2, 3)]
    assert contents(run, "seeds", "generate") == contents(finished_run, "seeds", "generate")


def test_a_dead_process_whose_number_is_reused_blocks_nobody(copied_run, make_config, tmp_path):
    """The kernel holds the lock; the text in its file names a live process."""
    (copied_run.path / "lock").write_text(f"process {os.getppid()} on {socket.gethostname()}\n")
    assert stages_run(run_again(make_config(tmp_path))) == []
