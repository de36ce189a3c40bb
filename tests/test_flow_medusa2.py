"""Medusa-2 from end to end: what it skips, and that everything after training looks at the tuned
backbone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from pipeline.cli.app import app
from pipeline.errors import EnvironmentFault
from pipeline.export.layout import read_layout
from pipeline.flow import statuses_of
from pipeline.storage.run_directory import RunDirectory
from tests.cli.tables import line_of
from tests.export.hub_stand_in import hub_on_loopback
from tests.flows.tiny import (
    latest,
    report_of,
    run_again,
    stages_run,
    stored,
)
from tests.targets.adapters import logits_with_adapter_on

pytestmark = pytest.mark.slow

JOINT = {
    "train__method": "medusa-2",
    "train__backbone__sequence_length": 96,
    "train__backbone__batch_sequences": 4,
    "train__backbone__micro_batch": 4,
    "train__backbone__lora_rank": 4,
    "train__backbone__lr": 0.05,  # enough for other words
    "train__backbone__max_kl": 50.0,
    "check__prompts": 4,
}
STAGES = ["seeds", "generate", "train", "tuned-features", "calibrate", "export", "check"]


@pytest.fixture(scope="module")
def joint_run(tmp_path_factory, make_config) -> RunDirectory:
    """The joint recipe, run once. Nobody writes into it: see `run`."""
    return run_again(make_config(tmp_path_factory.mktemp("joint"), **JOINT))


@pytest.fixture
def run(tmp_path: Path, joint_run: RunDirectory) -> RunDirectory:
    """A copy at `tmp_path/run`."""
    shutil.copytree(joint_run.path, tmp_path / "run", symlinks=True)
    return RunDirectory(tmp_path / "run")


def backbone_of(run: RunDirectory) -> Path:
    return latest(run, "export").path / "backbone"


def test_joint_runs_without_the_cache_and_says_so(joint_run, make_settings, tmp_path, capsys):
    assert stages_run(joint_run) == STAGES and joint_run.latest("features") is None
    report = report_of(joint_run)
    assert (report["method"], report["train"]["recipe"]) == ("medusa-2", "joint")
    assert "learns from the text" in report["skipped"]["features"] and "features" not in report
    page = (joint_run.path / "report.md").read_text()
    assert "learns from the text" in page and "Try train.method: medusa-1 first." in page
    states = statuses_of(*RunDirectory.open(joint_run.path))
    assert {name: state.status for name, state in states.items()} == {
        **dict.fromkeys(STAGES, "done"),
        "features": "skipped",
    }
    (tmp_path / "joint.yaml").write_text(
        yaml.safe_dump(make_settings(joint_run.path.parent, **JOINT))
    )
    app(["plan", str(tmp_path / "joint.yaml")], standalone_mode=False)
    out = capsys.readouterr().out
    assert line_of("features", out).split()[1] == "skip"
    assert "no states to cache" in out


def test_the_exported_backbone_is_merged_and_named_by_heads(joint_run, tiny_target):
    export = latest(joint_run, "export").path
    named = Path(read_layout(export).base_model_name_or_path)
    assert named.is_absolute() and named == export / "backbone" == backbone_of(joint_run)
    ids_BT = torch.arange(30).view(2, 15)
    expected = logits_with_adapter_on(
        tiny_target, latest(joint_run, "train").path / "adapter", ids_BT
    )
    logits = AutoModelForCausalLM.from_pretrained(named)(input_ids=ids_BT).logits
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)
    original = AutoModelForCausalLM.from_pretrained(tiny_target)(input_ids=ids_BT).logits
    assert (logits.argmax(-1) != original.argmax(-1)).any()
    assert (named / "model.safetensors").samefile(
        latest(joint_run, "train").path / "backbone/model.safetensors"
    )


def test_calibration_looks_at_held_out_rows_through_the_tuned_backbone(joint_run):
    rows = stored(latest(joint_run, "tuned-features"))
    generated = stored(latest(joint_run, "generate"))
    assert [row["id"] for row in rows] == [
        row["id"] for row in generated if row["split"] == "calibrate"
    ]
    model = AutoModelForCausalLM.from_pretrained(backbone_of(joint_run)).model
    for row in rows:
        hidden_ND = np.frombuffer(row["hidden"], np.float32).reshape(-1, 64)
        with torch.inference_mode():
            expected_TD = model(input_ids=torch.tensor([row["input_ids"]])).last_hidden_state[0]
        np.testing.assert_allclose(hidden_ND, expected_TD[row["positions"]], atol=2e-4)


def test_a_damaged_backbone_is_repaired_without_training(run, make_config, tmp_path):
    config = make_config(tmp_path, **JOINT)
    run_again(config, until="export")
    path = latest(run, "train").path / "backbone/model.safetensors"
    heads = latest(run, "train").path / "heads.safetensors"
    whole, trained = path.read_bytes(), heads.stat().st_mtime_ns
    path.unlink()  # of two names of one file this one
    path.write_bytes(whole[: len(whole) // 2])
    assert latest(run, "train").verify()
    assert stages_run(run_again(config, until="export")) == ["train"]
    assert latest(run, "train").verify() == [] and heads.stat().st_mtime_ns == trained
    assert path.read_bytes() == whole


def test_a_two_stage_training_that_gains_nothing_keeps_the_target(again, tiny_target):
    """At so high a learning rate the backbone only gets worse."""
    changes = {"train__backbone__recipe": "two-stage", "train__backbone__lr": 1.0}
    run = again(until="export", **JOINT | changes)
    assert stages_run(run) == [
        "seeds",
        "generate",
        "features",
        "train",
        "tuned-features",
        "calibrate",
        "export",
    ]
    tuned, target = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (backbone_of(run), tiny_target)
    )
    assert all(torch.equal(tuned[name], weight) for name, weight in target.items())
    summary = latest(run, "train").summary
    assert summary["best_step"] == 0 and "target is unchanged" in summary["warnings"][-1]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    yield from hub_on_loopback(monkeypatch, tmp_path)


def test_backbone_and_heads_are_pushed_without_local_paths(
    run, make_config, tmp_path, hub, tiny_target
):
    config = make_config(tmp_path, **JOINT, push__repo_id="me/small")
    run_again(config)
    backbone, heads = hub.repositories["me/small"], hub.repositories["me/small-speculator.medusa"]
    assert len(backbone.commits) == len(heads.commits) == 2  # the empty one, and ours
    assert json.loads(heads.files["config.json"])["base_model_name_or_path"] == "me/small"
    assert "medusa_lm_head.safetensors" in heads.files and "model.safetensors" not in heads.files
    for path in backbone_of(run).iterdir():
        assert backbone.files[path.name] == path.read_bytes()
    drift = latest(run, "check").summary["drift"]
    for repository in (backbone, heads):
        card = repository.files["README.md"].decode()
        assert f"{drift['kl']:.4f}" in card and f"{drift['greedy_agreement']:.1%}" in card
        assert "vllm serve me/small-speculator.medusa\n" in card
        for name, content in repository.files.items():
            assert (
                str(tmp_path).encode() not in content and str(tiny_target).encode() not in content
            ), name
    receipt = latest(run, "push").summary
    assert (receipt["repo"], receipt["backbone"]["repo"]) == (
        "me/small-speculator.medusa",
        "me/small",
    )
    asked = len(hub.requests)
    assert stages_run(run_again(config)) == [] and len(hub.requests) == asked


def test_a_push_interrupted_between_repositories_continues(run, make_config, tmp_path, hub):
    config = make_config(tmp_path, **JOINT, push__repo_id="me/small")
    hub.failures = {"POST /api/models/me/small-speculator.medusa/commit": 400}
    with pytest.raises(EnvironmentFault, match="400"):
        run_again(config)
    sent, hub.failures = hub.bytes_uploaded, {}
    assert stages_run(run_again(config)) == ["push"] and hub.bytes_uploaded == sent
    assert [
        len(hub.repositories[name].commits) for name in ("me/small", "me/small-speculator.medusa")
    ] == [2, 2]
    receipt = latest(run, "push").summary
    assert receipt["backbone"]["unchanged"] and not receipt["unchanged"]
