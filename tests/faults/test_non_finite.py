"""Rows with non-finite states are quarantined, and too many of them stop the run."""

from __future__ import annotations

import json
import shutil

from safetensors.torch import load_file, save_file

from pipeline.cli.app import app
from pipeline.cli.ending import ends_well
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.shards import read_rows
from tests.flows.tiny import latest, quarantined, shards_made

pytest_plugins = ["tests.flows.failing"]

LETTER = "w"


def test_rows_with_non_finite_states_stop_the_run_unless_allowed(tiny_target, run_fails, tmp_path):
    """The embedding of one letter in the seeds' answers is infinite."""
    target = tmp_path / "broken"
    shutil.copytree(tiny_target, target)
    token = json.loads((target / "tokenizer.json").read_text())["model"]["vocab"][LETTER]
    tensors = load_file(target / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = float("inf")
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    words = [f"target.model={target}", "generate.mode=passthrough"]
    printed = run_fails(3, *words)
    run = RunDirectory(tmp_path / "run")
    rows, bad = [], set()
    for path in latest(run, "generate").shards():
        rows += read_rows(path)
    for row in rows:
        if token in row["input_ids"][: row["spans"][-1]["end"] - 1]:
            bad.add(row["id"])
    assert 0.2 < len(bad) / len(rows) < 0.9
    features = latest(run, "features")
    refused = {line["id"]: line["reason"] for line in quarantined(features)}
    assert refused == dict.fromkeys(bad, "non-finite")
    assert "limits.max_quarantine_fraction" in printed
    assert features.done is None and run.latest("train") is None, "no stage goes on"

    config, allowed = str(tmp_path / "bad.yaml"), "limits.max_quarantine_fraction=0.9"
    line = ["run", config, *words, allowed, "--until", "features", "--executor", "inline"]
    assert ends_well(lambda: app(line, standalone_mode=False)) == 0
    assert shards_made(run) == []
    assert latest(run, "features").summary["reasons"] == {"non-finite": len(bad)}
