"""Recurrent heads through the whole flow: trained from the cache that Medusa heads read, exported, checked."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file

from pipeline.export.layout import read_layout
from pipeline.heads.recurrent import RecurrentShape
from tests.flows.tiny import STAGES, latest, run_again


def test_the_whole_flow_changes_no_token(make_config, tmp_path):
    run = run_again(make_config(tmp_path, train__heads="recurrent", train__recurrent={"intermediate_size": 32}))
    assert all(latest(run, name).done for name in STAGES)
    trained = load_file(latest(run, "train").path / "heads.safetensors")

    export = latest(run, "export").path
    assert read_layout(export).shape == RecurrentShape(64, 300, 3, intermediate_size=32)
    exported = load_file(export / "model.safetensors")
    assert all(torch.equal(exported[name], trained[name]) for name in exported.keys() & trained.keys())
    assert not [name for name in exported if "embed" in name or "lm_head" in name], "they are the target's"
    config = json.loads((export / "config.json").read_text())
    assert config["speculators_config"]["algorithm"] == "eagle" and config["intermediate_size"] == 32

    native = json.loads((run.path / "report.json").read_text())["check"]["native"]
    assert native["greedy_match"] == {"sequences": 8, "identical": 8, "ties": 0}
    assert native["acceleration_rate"] > 1
