"""Hidden states that are no numbers: their rows are quarantined with the reason, and too many of
them stop the run.
"""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from pipeline.cli.app import app
from pipeline.cli.ending import ends_well
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.shards import read_rows
from tests.flows.tiny import latest, shards_made

pytest_plugins = ["tests.flows.failing"]

LETTER = "w"


@pytest.fixture
def broken_target(tmp_path, tiny_target):
    """`broken_target(value)`: a target with this value in the embedding of one letter, and the
    letter's token id.
    """

    def make(value: float):
        target = tmp_path / "broken"
        shutil.copytree(tiny_target, target)
        token = json.loads((target / "tokenizer.json").read_text())["model"]["vocab"][LETTER]
        tensors = load_file(target / "model.safetensors")
        tensors["model.embed_tokens.weight"][token] = value
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        return target, token

    return make


def refused_by(stage) -> dict[str, str]:
    files = sorted((stage.path / "quarantine").iterdir())
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {row["id"]: row["reason"] for row in rows}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_of_states_that_are_no_numbers_stop_the_run_by_their_fraction_and_go_on_when_it_is_allowed(  # noqa: E501
    broken_target, run_fails, tmp_path, value
):
    """The seeds' own answers, so that it is the real engine's states that tell."""
    target, token = broken_target(value)
    words = [f"target.model={target}", "generate.mode=passthrough"]
    said = run_fails(3, *words)
    run = RunDirectory(tmp_path / "run")
    features, seen = latest(run, "features"), list(read_rows_of(latest(run, "generate")))
    bad = {row["id"] for row in seen if token in row["input_ids"][: row["spans"][-1]["end"] - 1]}
    assert 0.2 < len(bad) / len(seen) < 0.9 and refused_by(features) == dict.fromkeys(
        bad, "non-finite"
    )
    assert (
        f"features refused {len(bad)} of {len(seen)} rows" in said
        and f"top reasons: non-finite {len(bad)}" in said
    )
    assert "limits.max_quarantine_fraction = 0.2" in said and str(features.path) in said
    assert features.done is None and run.latest("train") is None, "nothing goes on by itself"

    line = [
        "run",
        str(tmp_path / "bad.yaml"),
        *words,
        "limits.max_quarantine_fraction=0.9",
        "--until",
        "features",
    ]
    assert ends_well(lambda: app([*line, "--executor", "inline"], standalone_mode=False)) == 0
    assert shards_made(run) == [] and latest(run, "features").summary["reasons"] == {
        "non-finite": len(bad)
    }


def read_rows_of(stage):
    for path in stage.shards():
        yield from read_rows(path)
