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
from pipeline.report.plots import draw_plots
from pipeline.run.reporting import drawing_data
from tests.flows.tiny import latest, run_again, stages_run, token_rows

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
    assert 1 + sum(summary["tokens_by_depth"]) == pytest.approx(expected, abs=1e-3)
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


def test_the_size_is_chosen_by_what_dynamic_trees_cost(
    copied_run, make_config, tmp_path, monkeypatch
):
    def costly(model, heads, trees, prompts, context, progress):
        asked.append(trees)
        return {size: 1.0 + 100 * (size > 3) for size in trees}

    asked: list = []
    monkeypatch.setattr("pipeline.evaluation.overhead.overhead_curve", costly)
    config = make_config(
        tmp_path, calibrate__tree="dynamic", calibrate__nodes="auto", calibrate__top=4
    )
    run = run_again(config, until="calibrate")
    assert stages_run(run) == ["calibrate"]
    trees, _ = asked  # the second are the chains
    assert trees == {size: DynamicTree(size, 3, 4) for size in (1, 3, 7, 15, 31)}, "36 are proposed"
    tree = latest(run, "calibrate").summary["tree"]
    assert tree["nodes"] == tree["dynamic"]["num_nodes"] <= 3
    rates = [size["expected_acceleration_rate"] for size in tree["sizes"]]
    assert rates == sorted(rates) and len(rates) == 5
    assert "tree" not in draw_plots(drawing_data(run)), "its paths are another tree's"


def test_a_tree_of_one_s_own_does_not_grow(make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"takes no calibrate\.choices"):
        make_config(tmp_path, calibrate__tree="dynamic", calibrate__choices=[[0]])
