"""The report says where its speeds were measured, and of which commit the target was."""

from __future__ import annotations

from importlib.metadata import version

from pipeline.execution.machine import hardware
from pipeline.run.reporting import assemble_report
from tests.flows.tiny import edit_summary, latest

NODE = {"cpu": "another", "cores": 96, "memory_gb": 900, "gpus": ["NVIDIA H200"]}


def test_the_report_s_hardware_is_the_worker_s_that_decoded(copied_run, make_config, tmp_path):
    assert latest(copied_run, "check").summary["hardware"].keys() == NODE.keys()
    edit_summary(copied_run, "check", hardware=NODE)
    assert assemble_report(copied_run, make_config(tmp_path)).hardware == NODE
    edit_summary(copied_run, "check", hardware=None, target_revision="0123abc")
    report = assemble_report(copied_run, make_config(tmp_path))
    assert (report.hardware, report.target_revision) == (hardware(), "0123abc")


def test_versions_are_those_of_the_check(copied_run, make_config, tmp_path, monkeypatch):
    before = assemble_report(copied_run, make_config(tmp_path)).versions
    assert before["torch"] == version("torch")
    monkeypatch.setattr("pipeline.run.reporting.versions", lambda: {"torch": "99"})
    assert assemble_report(copied_run, make_config(tmp_path)).versions == before
