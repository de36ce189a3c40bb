"""The report says where its speeds were measured, and of which commit the target was."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from pipeline.execution.machine import hardware
from pipeline.run.reporting import assemble_report
from pipeline.storage.run_directory import RunDirectory
from tests.flows.tiny import edit_summary

NODE = {"cpu": "another", "cores": 96, "memory_gb": 900, "gpus": ["NVIDIA H200"]}


@pytest.mark.parametrize(
    ("heads", "method", "words"),
    [
        ("recurrent", "medusa-1", "Recurrent heads, model unchanged, 4 draft steps in training"),
        ("medusa", "medusa-1", "Medusa heads, model unchanged, 4 heads"),
        ("medusa", "medusa-2", "Medusa heads, model tuned with them (Medusa-2), 4 heads"),
    ],
)
def test_heads_are_named_with_what_becomes_of_the_model(
    make_config, tmp_path, heads, method, words
):
    train = {"train__heads": heads, "train__method": method, "train__num_heads": 4}
    config = make_config(tmp_path, **train)
    assert assemble_report(RunDirectory(tmp_path), config).drafter == words


def test_hardware_versions_and_commit_are_those_of_the_check(
    copied_run, make_config, tmp_path, monkeypatch
):
    monkeypatch.setattr("pipeline.run.reporting.versions", lambda: {"torch": "99"})
    config = make_config(tmp_path)
    report = assemble_report(copied_run, config)
    assert report.versions["torch"] == version("torch") and report.hardware.keys() == NODE.keys()
    edit_summary(copied_run, "check", hardware=NODE, target_revision="0123abc")
    report = assemble_report(copied_run, config)
    assert (report.hardware, report.target_revision) == (NODE, "0123abc")
    edit_summary(copied_run, "check", hardware=None)
    assert assemble_report(copied_run, config).hardware == hardware()
