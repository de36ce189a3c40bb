"""Each way that input can be wrong: its exit code, one paragraph that says what to do, nothing
lost.
"""

from __future__ import annotations

import json
import shutil

import pytest

from pipeline.flow import statuses_of
from pipeline.storage.run_directory import RunDirectory
from tests.flows.tiny import (
    CONTEXT,
    run_again,
    save_target,
    stages_run,
)

pytest_plugins = ["tests.flows.failing"]


def lines(rows: list) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expected"),
        ("[]", "Expected"),
        (lines([{"price": 3}, {"price": 4}]), "price"),
        (lines([{"prompt": f"{n} " + "moon river " * CONTEXT} for n in range(30)]), "too-long"),
    ],
    ids=["empty", "an empty list", "no conversations", "too long"],
)
def test_an_unusable_file_of_seeds_is_exit_code_3(intact, run_fails, tmp_path, text, says):
    (tmp_path / "seeds.jsonl").write_text(text)
    assert says in run_fails(3, f"seeds.sources={tmp_path / 'seeds.jsonl'}")


def test_a_target_without_a_chat_template(intact, run_fails, tmp_path):
    said = run_fails(2, target__model=str(save_target(tmp_path / "plain", template=None)))
    assert "target.chat_template" in said


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", {"max_position_embeddings": "512"}),
        ("config.json", {"vocab_size": 320}),  # not lm_head's
        ("config.json", "{"),
        ("generation_config.json", {"eos_token_id": "1"}),
        ("generation_config.json", {"eos_token_id": [1, 300]}),
        ("tokenizer.json", "{}"),
        (
            "model.safetensors.index.json",
            {"weight_map": {"lm_head.weight": "../others.safetensors"}},
        ),
    ],
)
def test_a_target_s_file_of_another_form_is_refused(
    intact, run_fails, tmp_path, tiny_target, file, text
):
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    if "index" in file:
        (target / "model.safetensors").unlink()
    if isinstance(text, dict):
        found = json.loads((target / file).read_text()) if (target / file).exists() else {}
        text = json.dumps(found | text)
    (target / file).write_text(text)
    said = run_fails(2, target__model=str(target))
    assert str(target) in said or "target.model" in said


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", '{"stage": "se', "\0" * 64])
def test_a_record_that_a_crash_cut_short_is_mended(copied_run, make_config, tmp_path, text):
    train = copied_run.latest("train").path
    heads = (train / "heads.safetensors").read_bytes()
    places = [stage.path for stage in copied_run.stages().values()]
    for name in ("DONE.json", "stage.json", "upstream.json", "receipts/00001.json"):
        for place in places:
            if (place / name).exists():
                (place / name).write_text(text)
    (copied_run.path / "digests.json").write_text(text)
    _, config = RunDirectory.open(copied_run.path)
    assert statuses_of(copied_run, config) and [
        stage.verify() for stage in copied_run.stages().values()
    ]
    run = run_again(make_config(tmp_path))
    assert (train / "heads.safetensors").read_bytes() == heads
    assert all(stage.done and not stage.verify() for stage in run.stages().values())
    assert stages_run(run_again(make_config(tmp_path))) == []


def test_a_damaged_log_or_stage_json_ends_no_run(copied_run, make_config, tmp_path):
    train = copied_run.latest("train").path
    log, described = train / "metrics.jsonl", train / "stage.json"
    log.write_bytes(b"\xff\xfe\n" + log.read_bytes()[:-9])
    whole = described.read_bytes()
    described.write_bytes(whole[:-9])
    run = run_again(make_config(tmp_path), fresh="calibrate")
    assert stages_run(run) == ["calibrate"] and described.read_bytes() == whole
