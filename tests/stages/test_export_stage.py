"""The export holds the trained heads bit for bit, whichever way their lm_head is trained and
stored.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.export.directory import read_heads
from pipeline.export.layout import read_layout
from pipeline.heads.shapes import MedusaShape
from tests.flows.tiny import (
    report_of,
    run_again,
    stages_run,
)


def test_the_export_is_what_servers_ask_for(finished_run, tiny_target):
    """The trained heads bit for bit; the card has the checked figures, and all else is verified."""
    export = finished_run.path / "latest/export"
    trained = load_file(finished_run.path / "latest/train/heads.safetensors")
    exported = load_file(export / "medusa_lm_head.safetensors")
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], trained[name]) for name in trained)
    assert read_layout(export).shape == MedusaShape(
        hidden_size=64, vocab_size=300, num_heads=3, num_layers=1
    )
    config = json.loads((export / "config.json").read_text())
    assert config["model_type"] == "medusa" and config["medusa_fc_bias"] is True
    assert config["base_model_name_or_path"] == str(tiny_target)
    assert "architectures" not in config and "num_hidden_layers" not in config
    ours, theirs = AutoTokenizer.from_pretrained(export), AutoTokenizer.from_pretrained(tiny_target)
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template
    tree = json.loads((finished_run.path / "latest/calibrate/tree.json").read_text())
    assert json.loads((export / "medusa_choices.json").read_text()) == tree["choices"]
    report = report_of(finished_run)
    rate = report["check"]["native"]["acceleration_rate"]
    assert f"{rate:.2f}" in (export / "README.md").read_text()
    assert finished_run.latest("export").verify() == []


@pytest.mark.parametrize(("form", "further"), [("expanded", ["shared"]), ("shared", [])])
def test_tied_heads_carry_the_target_s_own_lm_head(
    copied_run, make_config, tmp_path, tiny_target, form, further
):
    config = make_config(tmp_path, train__medusa__lm_head="tied", export__formats=[form, *further])
    run = run_again(config, until="check")
    assert stages_run(run) == ["train", "calibrate", "export", "check"]
    stored = load_file(run.path / "latest/export/medusa_lm_head.safetensors")
    lm_heads = [name for name in stored if name.endswith(".1.weight")]
    assert len(lm_heads) == (3 if form == "expanded" else 1)
    lm_head_VD = AutoModelForCausalLM.from_pretrained(tiny_target).lm_head.weight
    assert all(torch.equal(stored[name], lm_head_VD) for name in lm_heads)
    listed = set(run.latest("export").done.files)
    assert {f"{name}/config.json" for name in further} <= listed, (
        "verified and pushed with the rest"
    )
    for name in further:
        assert torch.equal(read_heads(run.path / "latest/export" / name, None).lm_head, lm_head_VD)
