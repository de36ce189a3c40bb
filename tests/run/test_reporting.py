"""The report says where its speeds were measured, and of which commit the target was."""

from __future__ import annotations

import json
import os
from importlib.metadata import version

import pytest

from pipeline.execution.machine import hardware
from pipeline.run.reporting import assemble, publish_report
from tests.flows.tiny import context_of, edit_summary

NODE = {"cpu": "another", "cores": 96, "memory_gb": 900, "gpus": ["NVIDIA H200"]}


def test_the_check_keeps_what_it_ran_on(finished_run):
    kept = finished_run.latest("check").summary["hardware"]
    assert kept["cores"] == len(os.sched_getaffinity(0)) and kept.keys() == NODE.keys()


def test_the_report_s_hardware_is_the_worker_s_that_decoded(copied_run, make_config, tmp_path):
    edit_summary(copied_run, "check", hardware=NODE)
    assert assemble(copied_run, make_config(tmp_path)).hardware == NODE


def test_a_check_without_hardware_reports_this_machine(copied_run, make_config, tmp_path):
    edit_summary(copied_run, "check", hardware=None)
    assert assemble(copied_run, make_config(tmp_path)).hardware == hardware()


def test_versions_are_those_of_the_check(copied_run, make_config, tmp_path, monkeypatch):
    before = assemble(copied_run, make_config(tmp_path)).versions
    assert before["torch"] == version("torch")
    monkeypatch.setattr("pipeline.run.reporting.versions", lambda: {"torch": "99"})
    assert assemble(copied_run, make_config(tmp_path)).versions == before


@pytest.mark.parametrize("commit", ["0123abc", None])
def test_the_report_has_a_hub_target_s_commit(copied_run, make_config, tmp_path, commit):
    edit_summary(copied_run, "check", target_revision=commit)
    context = context_of(make_config(tmp_path), copied_run)
    publish_report(context)
    report = json.loads((copied_run.path / "report.json").read_text())
    assert report.get("target_revision") == commit
