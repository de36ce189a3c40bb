"""The report says where its speeds were measured, and of which commit the target was."""

from __future__ import annotations

import json
import os
from importlib.metadata import version

import pytest

from pipeline.execution.executor import make_executor
from pipeline.execution.machine import hardware, with_surroundings
from pipeline.execution.placement import Placement
from pipeline.run.reporting import assemble, publish_report
from pipeline.stages import check
from pipeline.targets.spec import TargetSpec
from tests.flows.tiny import context_of, edit_summary

NODE = {"cpu": "another", "cores": 96, "memory_gb": 900, "gpus": ["NVIDIA H200"]}


def test_the_check_keeps_what_it_ran_on(finished_run):
    kept = finished_run.latest("check").summary["hardware"]
    assert kept["cores"] == len(os.sched_getaffinity(0)) and kept.keys() == NODE.keys()


def test_the_report_s_hardware_is_the_worker_s_that_decoded(copied_run, make_config, tmp_path):
    edit_summary(copied_run, "check", hardware=NODE)
    assert assemble(copied_run, make_config(tmp_path))[0]["hardware"] == NODE


def test_a_check_that_does_not_say_where_it_ran_leaves_this_machine(
    copied_run, make_config, tmp_path
):
    edit_summary(copied_run, "check", hardware=None)
    assert assemble(copied_run, make_config(tmp_path))[0]["hardware"] == hardware()


def test_versions_are_those_of_the_check_and_not_of_who_reports_later(
    copied_run, make_config, tmp_path, monkeypatch
):
    before = assemble(copied_run, make_config(tmp_path))[0]["versions"]
    assert before["torch"] == version("torch")
    monkeypatch.setattr("pipeline.run.reporting.versions", lambda: {"torch": "99"})
    assert assemble(copied_run, make_config(tmp_path))[0]["versions"] == before


def where(**arguments: object) -> dict:
    return {"arguments": arguments, "visible": os.environ.get("ONLY_THERE")}


@pytest.mark.slow
def test_hardware_and_versions_are_asked_in_the_process_that_works(ray_cluster, monkeypatch):
    """With Ray a process of its own, which need not be on this machine."""
    monkeypatch.setattr("pipeline.execution.machine.hardware", lambda: "the driver's")
    monkeypatch.setattr("pipeline.execution.machine.versions", lambda: {"torch": "the driver's"})
    found = make_executor("ray").call(
        with_surroundings, {"function": where, "a": 1}, Placement(1, 1, 0)
    )
    assert found["arguments"] == {"a": 1} and found["hardware"]["cpu"] == hardware()["cpu"]
    assert found["versions"]["torch"] == version("torch")


@pytest.mark.parametrize("model", ["owner/model", None])
def test_a_target_of_the_hub_stands_in_the_check_s_record_and_the_report_with_its_commit(
    copied_run, make_config, tmp_path, model
):
    changes = {"target__model": model} if model else {"target__revision": "main"}
    context = context_of(make_config(tmp_path, **changes), copied_run)
    context.resolved.__dict__["target"] = TargetSpec(
        model or context.config.target.model, revision="0123abc"
    )
    made_of = check.made_of(context)
    assert made_of["configuration"] == json.loads(
        json.dumps(context.config.model_dump(mode="json"))
    )
    edit_summary(copied_run, "check", **made_of)
    publish_report(context)
    report = json.loads((copied_run.path / "report.json").read_text())
    assert (
        report.get("target_revision")
        == made_of.get("target_revision")
        == ("0123abc" if model else None)
    )
