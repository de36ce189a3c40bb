"""Every family of docs/models.md in miniature, through the whole flow with both kinds of heads; and
what is refused.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.families import FAMILIES, REFUSED, save_family, save_refused, save_tokenizer
from pipeline.conversations.conversation import Message
from pipeline.errors import ConfigError
from pipeline.storage.shards import read_rows
from pipeline.targets.spec import TargetSpec, load_chat_template
from tests.flows.tiny import latest, run_again

SMALL = {
    "generate__max_new_tokens": 6,
    "calibrate__nodes": 4,
    "check__prompts": 3,
    "check__max_new_tokens": 6,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_runs_from_seeds_to_an_exact_check_with_both_kinds_of_heads(
    name, make_config, tiny_seeds, tmp_path
):
    target = save_family(name, tmp_path / "target")
    seeds = [{"path": str(tiny_seeds), "limit": 24}]
    usual = {
        "target__model": str(target),
        "seeds__sources": seeds,
        "run__store": str(tmp_path / "store"),
        **SMALL,
    }
    if arguments := FAMILIES[name].arguments:
        usual["target__template_arguments"] = arguments
    for heads in ("recurrent", "medusa"):
        run = run_again(make_config(tmp_path, run__name=heads, train__heads=heads, **usual))
        check = json.loads((run.path / "report.json").read_text())["check"]
        assert check["passed"], check["failures"]
        match = check["native"]["greedy_match"]
        assert match["identical"] + match["ties"] == match["sequences"] == 3
    rows = [row for path in latest(run, "generate").shards() for row in read_rows(path)]
    assert all(row["spans"] for row in rows) and len({row["parent_id"] for row in rows}) >= 20


def test_a_template_is_told_what_target_template_arguments_say(make_config, tmp_path):
    save_tokenizer(FAMILIES["Qwen3, with thinking"], tmp_path / "target")
    rendered = {
        arguments.get("enable_thinking"): load_chat_template(
            TargetSpec(str(tmp_path / "target"), template_arguments=arguments)
        ).render([Message("user", "why")], asks=True)
        for arguments in ({}, {"enable_thinking": True}, {"enable_thinking": False})
    }
    assert rendered[None] == rendered[True] != rendered[False]
    assert rendered[False] == rendered[True] + "<think>\n\n</think>\n\n"
    with pytest.raises(ConfigError, match="messages is given to every template already"):
        make_config(tmp_path, target__template_arguments={"messages": []})


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_verify_a_tree_is_refused_in_one_paragraph_before_anything_is_made(
    name, make_config, tmp_path
):
    target = save_refused(name, tmp_path / "target")
    with pytest.raises(ConfigError, match="cannot verify a tree") as refused:
        run_again(make_config(tmp_path / "runs", target__model=str(target)))
    said = str(refused.value)
    assert REFUSED[name][2] in said and "\n" not in said and "attention in every layer" in said
    assert not (tmp_path / "runs").exists() and refused.value.exit_code == 2
