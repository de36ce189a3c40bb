"""A dynamic tree through the whole flow: expected, exported, and decoded with wherever the export
is.
"""

from __future__ import annotations

import json

import pytest

from pipeline import load_export, open_run
from pipeline.artifacts.json_form import to_json
from pipeline.decoding.decoder import Decoder, acceleration_rate
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.errors import ConfigError
from tests.flows.tiny import latest, token_rows

CHANGES = {
    "medusa": ({}, "medusa_choices.json"),
    "recurrent": (
        {"train__heads": "recurrent", "train__recurrent": {"intermediate_size": 32}},
        "tree_choices.json",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHANGES)
def test_the_expected_rate_is_decoded_and_the_tree_exported(copied_run, again, kind):
    changes, choices_file = CHANGES[kind]
    run = again(calibrate__tree="dynamic", **changes)
    tree = DynamicTree(8, 3, 10)
    found, summary = open_run(run.path), latest(run, "calibrate").summary["tree"]
    stored = json.loads((run.path / "latest/calibrate/tree.json").read_text())
    assert (
        found.tree() == tree and stored["dynamic"] == to_json(tree) and len(stored["choices"]) == 8
    )
    assert (summary["nodes"], summary["depth"], summary["dynamic"]) == (8, 3, to_json(tree))
    expected = stored["expected_acceleration_rate"]
    assert found.simulated_acceleration_rate(tree) == expected

    native = found.report["check"]["native"]
    assert native["greedy_match"]["identical"] == 8
    config = json.loads((found.export / "config.json").read_text())
    assert config["heads"]["dynamic_tree"] == to_json(tree)
    assert json.loads((found.export / choices_file).read_text()) == stored["choices"]
    assert "8 nodes that the heads hold most probable" in (found.export / "README.md").read_text()
    assert "dynamic" in (run.path / "report.md").read_text()

    export = load_export(found.export, gpus=0)
    assert export.decoder.tree == tree
    endless = Decoder(export.target.model, export.heads, tree, eos_token_ids=())
    decoded = []
    for row in token_rows(latest(run, "generate")):  # held-out answers are greedy
        for span in (
            span for span in row.spans if row.split == "calibrate" and span.role == "assistant"
        ):
            ids = row.input_ids.tolist()
            decoded.append(endless.generate(ids[: span.start], span.end - span.start))
            assert decoded[-1].token_ids == ids[span.start : span.end]
    assert acceleration_rate(decoded) == pytest.approx(expected, abs=1e-9)


def test_a_tree_of_one_s_own_does_not_grow(make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"takes no calibrate\.choices"):
        make_config(tmp_path, calibrate__tree="dynamic", calibrate__choices=[[0]])
