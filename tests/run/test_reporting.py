"""The report says where its speeds were measured, and of which commit the target was."""

from __future__ import annotations

from importlib.metadata import version

from pipeline.execution.machine import hardware
from pipeline.run.reporting import assemble_report
from tests.flows.tiny import edit_summary

NODE = {"cpu": "another", "cores": 96, "memory_gb": 900, "gpus": ["NVIDIA H200"]}


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
