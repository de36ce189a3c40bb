"""Recurrent heads through the whole flow: trained from the cache that Medusa heads read, exported,
checked.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipeline.export.layout import read_layout
from pipeline.heads.shapes import RecurrentShape
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.shards import read_rows
from tests.flows.tiny import STAGES, latest, run_again


def most_written(run: RunDirectory, number: int) -> list[int]:
    """The tokens that the target wrote most often in train rows, of equals the lower ones."""
    rows = [
        row
        for path in latest(run, "generate").shards()
        for row in read_rows(path)
        if row["split"] == "train"
    ]
    counts = Counter(
        id
        for row in rows
        for span in row["spans"]
        for id in row["input_ids"][span["start"] : span["end"]]
    )
    return sorted(sorted(range(300), key=lambda token: (-counts[token], token))[:number])


@pytest.mark.slow
def test_a_draft_vocabulary_through_the_whole_flow(make_config, tmp_path):
    run = run_again(
        make_config(tmp_path, train__draft_vocab=40, train__epochs=6, calibrate__tree="dynamic")
    )
    trained = load_file(latest(run, "train").path / "heads.safetensors")
    assert (
        trained["token_map"].tolist() == most_written(run, 40) and len(trained["0.1.weight"]) == 40
    )
    export = latest(run, "export").path
    assert len(load_file(export / "medusa_lm_head.safetensors")["0.1.weight"]) == 300
    assert json.loads((export / "config.json").read_text())["heads"]["vocab_size"] == 40
    report = json.loads((run.path / "report.json").read_text())
    assert report["check"]["native"]["greedy_match"]["identical"] == 8
    assert (
        report["check"]["native"]["acceleration_rate"]
        > 1
        > report["train"]["draft_coverage"]
        > 0.25
    )
    assert "They propose 40 tokens only" in (export / "README.md").read_text()


def test_the_whole_flow_changes_no_token(make_config, tmp_path):
    settings = {
        "train__recurrent": {"intermediate_size": 32},
        "export__formats": ["expanded", "sglang"],
    }
    run = run_again(make_config(tmp_path, train__heads="recurrent", **settings))
    assert all(latest(run, name).done for name in STAGES)
    trained = load_file(latest(run, "train").path / "heads.safetensors")

    export = latest(run, "export").path
    assert read_layout(export).shape == RecurrentShape(64, 300, 3, intermediate_size=32)
    exported = load_file(export / "model.safetensors")
    assert all(
        torch.equal(exported[name], trained[name]) for name in exported.keys() & trained.keys()
    )
    assert not [name for name in exported if "embed" in name or "lm_head" in name], (
        "they are the target's"
    )
    config = json.loads((export / "config.json").read_text())
    assert (
        config["speculators_config"]["algorithm"] == "eagle" and config["intermediate_size"] == 32
    )
    assert not load_file(export / "sglang/model.safetensors")["fc.bias"].any()

    native = json.loads((run.path / "report.json").read_text())["check"]["native"]
    assert native["greedy_match"] == {"sequences": 8, "identical": 8, "ties": 0}
    assert native["acceleration_rate"] > 1


@pytest.mark.slow
def test_with_a_tuned_backbone_the_cell_is_measured_with_the_matrices_that_it_is_served_with(
    make_config, tmp_path
):
    """Of a draft vocabulary with the rows of the tokens that the target has written most often."""
    backbone = {
        "sequence_length": 128,
        "batch_sequences": 2,
        "lora_rank": 4,
        "loss": "ce",
        "lr": 1e-2,
    }
    settings = {
        "train__heads": "recurrent",
        "train__method": "medusa-2",
        "train__backbone": backbone,
        "train__draft_vocab": 40,
    }
    run = run_again(make_config(tmp_path, **settings), until="calibrate")
    trained = load_file(latest(run, "train").path / "heads.safetensors")
    tuned = AutoModelForCausalLM.from_pretrained(
        latest(run, "train").path / "backbone", dtype=torch.float32
    )
    tokens = most_written(run, 40)
    assert trained["token_map"].tolist() == tokens and len(trained["embed_tokens.weight"]) == 300
    torch.testing.assert_close(
        trained["lm_head.weight"], tuned.lm_head.weight.detach()[tokens], rtol=1e-5, atol=1e-5
    )
    original = AutoModelForCausalLM.from_pretrained(
        make_config(tmp_path).target.model, dtype=torch.float32
    )
    assert not torch.allclose(
        trained["lm_head.weight"], original.lm_head.weight[tokens], atol=1e-3
    ), "LoRA is on the lm_head, too"
