"""Recurrent heads through the whole flow: trained from the cache that Medusa heads read, exported,
checked.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipeline.export.layout import read_layout
from pipeline.heads.shapes import RecurrentShape
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.shards import read_rows
from tests.flows.tiny import STAGES, latest, report_of, run_again


def most_written(run: RunDirectory, number: int) -> list[int]:
    """The tokens written most often in train rows; ties are broken by the lower id."""
    counts: Counter[int] = Counter()
    for path in latest(run, "generate").shards():
        for row in read_rows(path):
            if row["split"] == "train":
                for span in row["spans"]:
                    counts.update(row["input_ids"][span["start"] : span["end"]])
    return sorted(sorted(range(300), key=lambda token: (-counts[token], token))[:number])


def trained_tensors(run: RunDirectory) -> dict[str, torch.Tensor]:
    return load_file(latest(run, "train").path / "heads.safetensors")


def test_the_whole_flow_changes_no_token(make_config, tmp_path):
    settings = {
        "train__heads": "recurrent",
        "train__recurrent": {"intermediate_size": 32},
    }
    run = run_again(make_config(tmp_path, **settings))
    assert all(latest(run, name).done for name in STAGES)
    trained, export = trained_tensors(run), latest(run, "export").path
    assert read_layout(export).shape == RecurrentShape(64, 300, 3, intermediate_size=32)
    exported = load_file(export / "model.safetensors")
    for name in exported.keys() & trained.keys():
        assert torch.equal(exported[name], trained[name])
    assert trained.keys() - exported.keys() == {"embed_tokens.weight", "lm_head.weight"}
    native = report_of(run)["check"]["native"]
    assert native["greedy_match"]["identical"] == 8
    assert native["acceleration_rate"] > 1


@pytest.mark.slow
def test_a_tuned_backbone_lends_its_matrices_to_the_cell(make_config, tmp_path):
    """A draft vocabulary takes the rows of the tokens that the target writes most often."""
    settings = {
        "train__heads": "recurrent",
        "train__method": "medusa-2",
        "train__backbone": {
            "sequence_length": 128,
            "batch_sequences": 2,
            "lora_rank": 4,
            "loss": "ce",
            "lr": 1e-2,
        },
        "train__draft_vocab": 40,
        "train__epochs": 4,
    }
    run = run_again(make_config(tmp_path, **settings), until="calibrate")
    trained, tokens = trained_tensors(run), most_written(run, 40)
    assert trained["token_map"].tolist() == tokens and len(trained["embed_tokens.weight"]) == 300
    rows = []
    for path in (latest(run, "train").path / "backbone", make_config(tmp_path).target.model):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        rows.append(model.lm_head.weight.detach()[tokens])
    tuned, original = rows
    torch.testing.assert_close(trained["lm_head.weight"], tuned, rtol=1e-5, atol=1e-5)
    change = (tuned - original).abs().max()
    assert change > 1e-4, "LoRA is on the lm_head, too"
