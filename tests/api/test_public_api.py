"""The public API: light to import, complete, documented; and what it loads decodes as the run's own
check does.
"""

from __future__ import annotations

import inspect
import json
import shutil

import pytest

import pipeline
from pipeline import (
    Decoder,
    acceleration_rate,
    acceptance_rule,
    load_export,
    load_heads,
    load_target,
    load_tree,
    open_run,
)
from pipeline.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def run(finished_run):
    return open_run(finished_run.path)


@pytest.fixture(scope="module")
def export(run):
    return load_export(run.path)


def test_every_public_name_is_documented():
    for name in pipeline.__all__:
        assert inspect.getdoc(getattr(pipeline, name)) and name in dir(pipeline), name
    with pytest.raises(AttributeError, match="load_everything"):
        pipeline.load_everything  # noqa: B018


def test_a_run_opens_with_what_its_stages_made(run, finished_run):
    report = json.loads((finished_run.path / "report.json").read_text())
    assert run.report == report
    assert (
        sum(len(list(run.conversations(split))) for split in ("train", "calibrate", "check"))
        == report["seeds"]["rows"]
    )
    assert {row.split for row in run.generated("check")} == {"check"}
    assert len(run.tree()) == report["tree"]["nodes"]
    assert run.accuracies()[0][0] == pytest.approx(report["heads"][0]["top1"], abs=1e-4)
    assert run.export.samefile(finished_run.path / "latest" / "export")


def test_a_run_that_has_not_come_so_far_says_so(tmp_path, copied_run):
    (copied_run.path / "latest" / "export").unlink()
    with pytest.raises(DataError, match="no finished export stage"):
        _ = open_run(copied_run.path).export
    with pytest.raises(ConfigError, match="has no export yet"):
        load_export(copied_run.path)
    with pytest.raises(ConfigError, match="absent"):
        open_run(tmp_path / "absent")


def test_settings_of_loading_are_refused_for_a_loaded_target(export):
    with pytest.raises(ConfigError, match="loaded already, without gpus, dtype"):
        load_export(export.path, target=export.target, gpus=0, dtype="bfloat16")


def test_the_export_decodes_what_the_target_alone_decodes(export):
    prompt = export.target.prompt([{"role": "user", "content": "why cat runs"}])
    plain = export.target.decoder().generate(prompt, 12)
    assert export.decoder.generate(prompt, 12).token_ids == plain.token_ids
    streamed = [token for new_ids in export.decoder.stream(prompt, 12) for token in new_ids]
    assert streamed == plain.token_ids
    batch = export.decoder.generate_batch([prompt, export.target.prompt("how moon")], 12)
    assert batch[0].token_ids == plain.token_ids and acceleration_rate([plain]) == 1.0
    text = "".join(export.target.stream_text(export.decoder.stream(prompt, 12)))
    assert text.strip() == export.target.text(plain.token_ids)


def test_trees_come_from_lists_files_and_runs(tmp_path, export, run):
    paths = [[0], [0, 0], [1]]
    (tmp_path / "tree.json").write_text(json.dumps(paths))
    target, heads = export.target, load_heads(run.export, export.target)
    trees = [target.decoder(heads, tree).tree.choices for tree in (paths, tmp_path / "tree.json")]
    direct = Decoder(target.model, heads, paths, eos_token_ids=())
    assert trees[0] == trees[1] == direct.tree.choices == ((0,), (1,), (0, 0))
    assert load_tree(run.path / "latest/calibrate/tree.json") == run.tree()


def test_a_tree_deeper_than_the_heads_is_refused(export, run):
    with pytest.raises(ConfigError, match="over 3 heads"):
        export.target.decoder(export.heads, [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]])
    with pytest.raises(ConfigError, match="parent is missing"):
        run.simulated_acceleration_rate([[0, 0]])


def test_a_target_loads_by_itself(tiny_target):
    target = load_target(tiny_target, gpus=0, dtype="float32")
    assert not target.model.training and 1 in target.eos_token_ids
    sampled = acceptance_rule("rejection", 0.7)
    with pytest.raises(ValueError, match="needs a generator"):
        target.decoder().generate(target.prompt("why"), 4, sampled)


def test_answers_also_end_at_the_template_s_end_of_turn(tiny_target, tmp_path):
    """The eos_token_ids of generation_config.json lack the 1 of `</s>` here."""
    target = shutil.copytree(tiny_target, tmp_path / "target")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [100]}))
    assert load_target(target, gpus=0).decoder().eos_token_ids == {1, 100}


def test_an_export_is_decoded_with_the_tree_that_is_given(export):
    given = load_export(export.path, target=export.target, tree=[[0], [2]])
    assert given.decoder.tree.choices == ((0,), (2,)) != export.decoder.tree.choices
