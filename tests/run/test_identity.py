"""A stage's directory depends on code, settings, input and the target's content, not on paths."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.flow import STAGES
from pipeline.run.context import Context
from pipeline.storage.stage_directory import StageDirectory
from tests.flows.tiny import context_of as context_of_run


@pytest.fixture
def context_of(finished_run):
    """A context that reads the finished run and writes nothing."""

    def made(config) -> Context:
        upstream = finished_run.stages()
        return context_of_run(config, finished_run, read_only=True, upstream=upstream)

    return made


def test_other_code_or_other_input_makes_another_directory(finished_run, make_config, context_of):
    context = context_of(make_config(finished_run.path.parent))
    for name, directory in finished_run.stages().items():
        stage = STAGES[name]
        assert stage.locate(context).fingerprint == directory.fingerprint
        newer = replace(stage, version=stage.version + 1)
        assert newer.locate(context).fingerprint != directory.fingerprint
        for source in stage.upstream(context.config):
            before = context.upstream[source]
            context.upstream[source] = StageDirectory(finished_run.path, source, "0" * 64)
            assert stage.locate(context).fingerprint != directory.fingerprint
            context.upstream[source] = before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chat_template", "{{ messages[0].content }}"),
        ("max_tokens", 64),
        ("dtype", "bfloat16"),
        ("template_arguments", {"enable_thinking": False}),
    ],
)
def test_a_setting_that_changes_what_the_target_says_changes_it(
    make_config, tmp_path, context_of, key, value
):
    before, after = make_config(tmp_path), make_config(tmp_path, **{f"target__{key}": value})
    assert context_of(before).target_identity != context_of(after).target_identity


def test_a_target_is_known_by_its_content_wherever_it_lies(
    make_config, tmp_path, context_of, tiny_target
):
    copied = Path(shutil.copytree(tiny_target, tmp_path / "copied"))
    before, after = make_config(tmp_path), make_config(tmp_path, target__model=str(copied))
    assert context_of(before).target_identity == context_of(after).target_identity
    settings = copied / "generation_config.json"
    settings.write_text(settings.read_text() + "\n")
    assert context_of(before).target_identity != context_of(after).target_identity


def test_seeds_are_known_by_their_content_wherever_they_lie(
    make_config, tmp_path, context_of, tiny_seeds
):
    moved = {"seeds__sources": [{"path": shutil.copy(tiny_seeds, tmp_path)}]}
    before, after = context_of(make_config(tmp_path)), context_of(make_config(tmp_path, **moved))
    assert STAGES["seeds"].locate(before).fingerprint == STAGES["seeds"].locate(after).fingerprint


OTHER = {
    "seeds": {
        "seeds": {"holdout": 0.3},
        "generate": {"mode": "self-talk", "rounds": 3},
    },
    "generate": {
        "generate": {"temperature": 0.9, "holdout_temperature": 0.9, "top_p": 0.9, "rounds": 3},
        "seeds": {"special_tokens": "keep"},
        "run": {"seed": 7},
    },
    "features": {"features": {"engine": "vllm", "precision": "fp8"}},
    "calibrate": {
        "calibrate": {"tree": "dynamic", "nodes": 4, "depth": 2, "top": 5, "draft_tokens": 2}
    },
    "export": {"export": {"formats": ["shared"]}},
    "check": {"check": {"max_new_tokens": 9, "prompts": 9, "acceptance": "typical"}},
}
SAME = {
    "features": {"features": {"tokens_per_batch": 99}, "placement": {"features": {"workers": 3}}},
    "check": {"check": {"min_acceleration_rate": 9.0, "max_tie_share": 0.9}},
}
NAMES = [
    (stage, f"{section}__{key}", value, kept)
    for kept, table in ((False, OTHER), (True, SAME))
    for stage, sections in table.items()
    for section, keys in sections.items()
    for key, value in keys.items()
]


@pytest.mark.parametrize(("stage", "key", "value", "kept"), NAMES)
def test_a_stage_is_named_by_the_settings_that_shape_it(
    make_config, tmp_path, context_of, stage, key, value, kept
):
    configs = make_config(tmp_path), make_config(tmp_path, **{key: value})
    before, after = (STAGES[stage].locate(context_of(config)).fingerprint for config in configs)
    assert (before == after) == kept
