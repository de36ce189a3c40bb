"""Settings that a stage could not carry out are refused before anything starts."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from tokenizers import AddedToken
from transformers import AutoConfig, AutoTokenizer

from pipeline.config.load import validate
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.execution.machine import SUBMITTED_JOB
from pipeline.run.checks import check_placements, check_plan, check_run, warnings
from tests.flows.tiny import resolved, run_again

HUB = {"target__model": "owner/model"}
MEDUSA_2 = {"train__method": "medusa-2"}
SHARD_4BIT = {"train__backbone__shard": True, "target__quantization": "4bit", **MEDUSA_2}
VLLM = {"check__engines": ["native", "vllm"]}
SAMPLED = {"check__acceptance": "rejection", "check__temperature": 0.7}

REFUSED = [
    ({"train__method": "medusa1"}, "train.method"),
    ({"calibrate__depth": 4}, "calibrate.depth"),
    ({"calibrate__draft_tokens": 4}, "calibrate.draft_tokens"),
    ({"calibrate__tree": "dynamic", "calibrate__nodes": 9999}, "calibrate.nodes"),
    ({"calibrate__choices": "/absent.json"}, "calibrate.choices"),
    ({"generate__max_new_tokens": 3}, "train.num_heads"),
    ({"check__max_new_tokens": 192}, "check.max_new_tokens"),
    ({"export__formats": ["shared"]}, "export.formats"),
    ({"train__draft_vocab": 301}, "train.draft_vocab"),
    ({"train__draft_vocab": 40, "train__heads": "recurrent", **VLLM}, "check.engines"),
    ({"seeds__sources": "/absent.jsonl"}, "seeds.sources"),
    ({"check__acceptance": "rejection"}, "check.temperature"),
    ({**SAMPLED, "check__acceptance": "typical", "check__top_p": 0.9}, "check.top_p"),
    ({"push__repo_id": "me/heads"}, "push.base_model"),
    ({"push__repo_id": "heads", "push__base_model": "owner/model"}, "push.repo_id"),
    ({"target__model": "/absent"}, "target.model"),
    ({"check__served_model": "/absent"}, "check.served_model"),
    ({"check__draft_tokens": [2, 4], **VLLM}, "check.draft_tokens"),
    ({"check__engine_baselines": ["draft-model"]}, "check.assistant_model"),
    ({"target__quantization": "8bit", **VLLM}, "check.engines"),
    (SHARD_4BIT, "train.backbone.shard"),
    ({"train__heads": "eagle3", **MEDUSA_2}, "train.method"),
    ({"train__heads": "eagle3", "calibrate__tree": "dynamic"}, "calibrate.tree"),
    ({"placement__train": {"gpus_per_worker": 2}, **MEDUSA_2}, "gpus_per_worker"),
]


@pytest.fixture(autouse=True)
def own_machine(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(("changes", "key"), REFUSED)
def test_a_plan_and_a_run_refuse_and_name_the_key(make_config, tmp_path, changes, key):
    for check in (lambda config: check_plan(resolved(config)), run_again):
        with pytest.raises(ConfigError, match=key) as caught:
            check(make_config(tmp_path, **changes))
        assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"generate__max_new_tokens": 3, "generate__mode": "passthrough"},
        {"export__formats": ["shared"], "train__medusa__lm_head": "tied"},
        {"push__repo_id": "me/heads", "push__base_model": "owner/model"},
        {**SHARD_4BIT, "train__backbone__quantization": "none"},
        {**SAMPLED, "check__acceptance": "typical"},
    ],
)
def test_a_run_is_allowed(make_config, tmp_path, changes):
    check_run(resolved(make_config(tmp_path, **changes)))


def test_an_assistant_has_the_target_s_vocabulary(make_config, tmp_path, tiny_target):
    smaller = tmp_path / "smaller"
    shutil.copytree(tiny_target, smaller)
    config = json.loads((smaller / "config.json").read_text())
    changes = {"check__engine_baselines": ["draft-model"], "check__assistant_model": str(smaller)}
    check_plan(resolved(make_config(tmp_path, **changes)))
    fewer = config["vocab_size"] - 1
    (smaller / "config.json").write_text(json.dumps({**config, "vocab_size": fewer}))
    with pytest.raises(ConfigError, match=r"differs from the target.*assistant_model"):
        check_plan(resolved(make_config(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("architecture", "refused"), [("LlamaForCausalLM", False), ("Gemma2ForCausalLM", True)]
)
def test_vllm_must_return_the_layers_that_heads_read(
    make_config, tmp_path, tiny_target, architecture, refused
):
    copy = shutil.copytree(tiny_target, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    for changes, key in (({"features__engine": "vllm"}, r"features\.engine"), (VLLM, "check")):
        run = resolved(
            make_config(tmp_path, target__model=str(copy), train__heads="eagle3", **changes)
        )
        if refused:
            with pytest.raises(ConfigError, match=f"not return for {architecture}.*{key}"):
                check_plan(run)
        else:
            check_plan(run)


def test_keys_that_nothing_reads_are_warned_of(make_config, tmp_path):
    config = make_config(tmp_path)
    written = validate(config.model_dump(mode="json"), "run.yaml")  # which sets every key
    assert warnings(resolved(config)) == warnings(resolved(written)) == []
    changes = {"train__backbone__lora_rank": 4, "train__backbone__lr": 1e-4}
    (warning,) = warnings(resolved(make_config(tmp_path, **changes)))
    assert "train.backbone.lora_rank" in warning and "train.backbone.lr" in warning
    assert warnings(resolved(make_config(tmp_path, **changes, **MEDUSA_2))) == []


def test_a_submitted_job_keeps_nothing_in_its_uploaded_copy(make_config, tmp_path, monkeypatch):
    (tmp_path / "copy").mkdir()
    monkeypatch.chdir(tmp_path / "copy")
    inside, outside = tmp_path / "copy" / "runs", tmp_path / "runs"
    check_run(resolved(make_config(inside)))
    monkeypatch.setenv(SUBMITTED_JOB, "{}")
    check_run(resolved(make_config(outside)))
    with pytest.raises(ConfigError, match=r"run\.root"):
        check_run(resolved(make_config(inside)))
    with pytest.raises(ConfigError, match=r"run\.store"):
        check_run(resolved(make_config(outside, run__store=str(inside))))


def test_a_missing_vllm_is_refused_by_an_unfinished_stage(make_config, tmp_path, monkeypatch):
    """A plan notes it."""
    config = make_config(tmp_path, generate__engine="vllm")
    check_run(resolved(config))
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EnvironmentFault, match=r"generate needs it.*generate\.engine"):
        check_run(resolved(config))
    assert "generate.engine" in " ".join(check_plan(resolved(config)))
    made = config.run.directory / "generate-0123abcd"
    made.mkdir(parents=True)
    (made / "DONE.json").write_text("{}")
    check_run(resolved(config))


@pytest.mark.parametrize(
    "changes",
    [HUB, {"check__assistant_model": "owner/model", "check__baselines": ["assistant"]}],
)
def test_an_unavailable_model_is_noted_in_a_plan(make_config, tmp_path, changes):
    """Seeds alone need no target."""
    config = make_config(tmp_path, **changes)
    run = resolved(config)
    assert "owner/model" in " ".join(check_plan(run))
    with pytest.raises(EnvironmentFault, match="owner/model"):
        check_run(run)
    check_run(resolved(config, ["seeds"]))


@pytest.mark.parametrize("key", ["target.model", "check.served_model", "check.assistant_model"])
@pytest.mark.parametrize("extra", ["adapter_config.json", "consolidated.safetensors"])
def test_weights_that_only_some_libraries_read_are_refused(
    make_config, tmp_path, tiny_target, key, extra
):
    """transformers applies an adapter beside the weights; vLLM reads every safetensors file.

    Mistral's own format is one.
    """
    copy = shutil.copytree(tiny_target, tmp_path / "copy")
    (copy / extra).write_text("{}")
    changes = {key.replace(".", "__"): str(copy)}
    if key == "check.assistant_model":
        changes["check__baselines"] = ["assistant"]
    config = make_config(tmp_path, **changes)
    for check in (check_plan, check_run):
        with pytest.raises(ConfigError, match=rf"Move {extra} .*{key}|{key}.*Move {extra}"):
            check(resolved(config))


def saved_with_tokens(target, directory, *tokens, **settings):
    """Copy a target to a directory, with these tokens added to its tokenizer alone."""
    shutil.copytree(target, directory)
    tokenizer = AutoTokenizer.from_pretrained(target)
    room = AutoConfig.from_pretrained(target).vocab_size - len(tokenizer)
    fillers = [AddedToken(f"<|filler {number}|>", special=True) for number in range(room)]
    added = [AddedToken(token, **settings) for token in tokens]
    tokenizer.add_tokens([*fillers, *added])
    tokenizer.save_pretrained(directory)
    return tokenizer


@pytest.mark.parametrize("special", [True, False])
def test_a_prompt_s_token_without_an_embedding_is_refused(
    make_config, tmp_path, tiny_target, special
):
    """A special one counts if the template writes it, or messages keep their special tokens."""
    tokens = ("<|unused|>", "<|turn|>")
    tokenizer = saved_with_tokens(tiny_target, tmp_path / "wide", *tokens, special=special)
    wide = {"target__model": str(tmp_path / "wide")}
    template = tokenizer.chat_template
    for text, named in ((template, not special), ("<|turn|>" + template, True)):
        run = resolved(make_config(tmp_path, **wide, target__chat_template=text))
        if not named:
            assert check_plan(run) == []
            continue
        token = "turn" if special else "unused"
        for check in (check_plan, check_run):
            with pytest.raises(ConfigError, match=rf"<\|{token}\|>.*300.*target\.model"):
                check(run)
    run = resolved(make_config(tmp_path, **wide, seeds__special_tokens="keep"))
    with pytest.raises(ConfigError, match=r"<\|unused\|>.*300"):
        check_plan(run)


def test_two_different_ends_are_both_named(make_config, tmp_path, tiny_target):
    assert warnings(resolved(make_config(tmp_path))) == []
    copy = shutil.copytree(tiny_target, tmp_path / "copy")
    tokenizer = AutoTokenizer.from_pretrained(copy)
    other = tokenizer.convert_ids_to_tokens(7)
    path = copy / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 7}))
    (warning,) = warnings(resolved(make_config(tmp_path, target__model=str(copy))))
    assert other in warning and tokenizer.eos_token in warning


def test_a_check_alone_is_placed_where_its_engines_decode(make_config, tmp_path):
    for name in ("generate", "features", "train", "calibrate"):
        directory = tmp_path / "run" / f"{name}-0000"
        directory.mkdir(parents=True)
        (directory / "DONE.json").write_text("{}")
    large = {"placement__generate": {"gpus_per_worker": 4}}
    run = resolved(make_config(tmp_path, check__engines=["native"], **large))
    assert run.open_stages == ("seeds", "export", "check")
    check_placements(run)
    with pytest.raises(EnvironmentFault, match="cannot place generate"):
        check_placements(resolved(make_config(tmp_path, **VLLM, **large)))
