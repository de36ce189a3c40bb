"""Settings are strict data: unknown keys are named, paths mean what their place says, and a dump
gives the same run.
"""

import ast
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import config as declarations
from pipeline.config.load import dump_config, load_config
from pipeline.errors import ConfigError

ROOT = Path(__file__).parents[2]
MINIMAL = (
    "run: {name: trial, root: runs}\ntarget: {model: ./target}\nseeds: {sources: [{path:"
    " seeds.jsonl}]}\n"
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "conf" / "trial.yaml"
    path.parent.mkdir()
    path.write_text(MINIMAL)
    return path


def test_paths_in_the_file_are_relative_to_the_file(file):
    config = load_config(file)
    assert config.run.root == file.parent / "runs"
    assert config.target.model == str(file.parent / "target")
    assert config.seeds.sources[0].path == file.parent / "seeds.jsonl"


def test_every_key_that_may_be_a_path_is_relative_to_the_file(file):
    settings = yaml.safe_load(file.read_text())
    keys = [
        (section, key)
        for section, declared in declarations.Config.model_fields.items()
        for key, field in declared.annotation.model_fields.items()
        if Path in (field.annotation, *get_args(field.annotation))
    ]
    assert len(keys) >= 5
    for section, key in keys:
        settings.setdefault(section, {})[key] = "there"
    file.write_text(yaml.safe_dump(settings))
    found = load_config(file).model_dump()
    assert {found[section][key] for section, key in keys} == {file.parent / "there"}


def test_paths_in_an_override_are_relative_to_the_working_directory(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(file, ["seeds.sources=mine.json", "run.root=out", "target.model=./other"])
    assert config.seeds.sources[0].path == tmp_path / "mine.json"
    assert config.run.root == tmp_path / "out"
    assert config.target.model == str(tmp_path / "other")


def test_a_tree_is_a_list_of_paths_or_a_file_with_one(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(file, ["calibrate.choices=[[0], [0, 1]]"]).calibrate.choices == (
        (0,),
        (0, 1),
    )
    assert (
        load_config(file, ["calibrate.choices=tree.json"]).calibrate.choices
        == tmp_path / "tree.json"
    )


def test_a_hub_id_stays_a_hub_id(file):
    assert (
        load_config(file, ["target.model=HuggingFaceH4/zephyr-7b-beta"]).target.model
        == "HuggingFaceH4/zephyr-7b-beta"
    )


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("train.num_haeds=3", "did you mean 'train.num_heads'"),
        ("tarin.lr=1", "did you mean 'train'"),
        (
            "seeds.sources=[{paht: x}]",
            "there is no key 'seeds.sources.0.paht'; did you mean 'seeds.sources.0.path'",
        ),
        ("train.lr=fast", "'train.lr'"),
        ("train.decay=2", "less than or equal to 1"),
        ("train.backbone.lambda_0=0", "'train.backbone.lambda_0': it must be greater than 0"),
        (
            "train.backbone.lambda_0=1.5",
            "'train.backbone.lambda_0': it must be less than or equal to 1",
        ),
        ("train.backbone.lora_rank=0", "'train.backbone.lora_rank'"),
        ("train.backbone.lora_dropout=1", "'train.backbone.lora_dropout': it must be less than 1"),
        ("train.backbone.lr=-1e-4", "'train.backbone.lr'"),
        ("train.backbone.schedule=cosine", "'train.backbone.schedule'"),
        (
            "calibrate.choices=[[0], [a]]",
            "'calibrate.choices': give a list of paths such as [[0], [0, 0], [1]]",
        ),
        ("calibrate.choices=[]", "'calibrate.choices': give a list of paths"),
        ("calibrate.choices=3", "'calibrate.choices': give a list of paths"),
        ("nonsense", "is not an override"),
        ("train.lr.x=1", "'train.lr': it must be a number or 'auto', not {\"x\": 1}"),
        ("train.epochs=[1]", "'train.epochs': it must be a whole number or 'auto', not [1]"),
        (
            "generate.rounds=2024-01-02",
            "'generate.rounds': it must be a whole number, not 2024-01-02",
        ),
        ("train.roles=5", "'train.roles': it must be a list, not 5"),
        ("train.medusa=5", "'train.medusa': it must be a section with keys, not 5"),
        (
            "train.recurrent.intermediate_size=1.5",
            "'train.recurrent.intermediate_size': it must be a whole number",
        ),
        ("export.formats=[expanded, expanded]", "'export.formats': name each format once"),
        ("run.name.x=1", "reaches into a value"),
        ("generate.mode=reply", "'generate.mode'"),
        ("seeds.sources=[]", "at least one source"),
        (
            "check.prompts=0",
            "'check.prompts': ask at least one held-out row, or name a file of questions, not 0",
        ),
        (
            "check.prompts=-3",
            "'check.prompts': ask at least one held-out row, or name a file of questions, not -3",
        ),
        (
            "check.prompts=1.5",
            "'check.prompts': ask at least one held-out row, or name a file of questions, not 1.5",
        ),
        (
            "check.prompts=true",
            "'check.prompts': ask at least one held-out row, or name a file of questions, not true",
        ),
        ("train.lr=.inf", "'train.lr'"),
        ("train.shard_heads=true", "'train.shard_heads' is gone"),
        ("generate.engine_args={hf_token: hf_abc}", "hf_token would be written to run.yaml"),
        (
            "generate.engine_args={proxies: [x, 'http://me:word@host']}",
            "generate.engine_args.proxies holds a token",
        ),
    ],
)
def test_a_mistake_is_named_in_one_paragraph_with_exit_code_2(file, word, says):
    with pytest.raises(ConfigError) as caught:
        load_config(file, [word])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


MOVED = {
    "train.num_layers": "train.medusa.num_layers",
    "train.lm_head": "train.medusa.lm_head",
    "train.recipe": "train.backbone.recipe",
    "train.backbone_loss": "train.backbone.loss",
    "train.schedule": "train.backbone.schedule",
    "train.lambda_0": "train.backbone.lambda_0",
    "train.backbone_lr": "train.backbone.lr",
    "train.lora_rank": "train.backbone.lora_rank",
    "train.lora_alpha": "train.backbone.lora_alpha",
    "train.lora_dropout": "train.backbone.lora_dropout",
    "train.sequence_length": "train.backbone.sequence_length",
    "train.batch_sequences": "train.backbone.batch_sequences",
    "train.micro_batch": "train.backbone.micro_batch",
    "train.gradient_checkpointing": "train.backbone.gradient_checkpointing",
    "train.quantization": "train.backbone.quantization",
    "train.shard_backbone": "train.backbone.shard",
    "train.max_kl": "train.backbone.max_kl",
    "train.lora_rnk": "train.backbone.lora_rank",
    "train.medusa.lora_rank": "train.backbone.lora_rank",
    "train.backbone.lorarank": "train.backbone.lora_rank",
    "train.lern_rate": None,
    "placement.train.worker": "placement.train.workers",
    "calibrate.prompts": "check.prompts",
}


@pytest.mark.parametrize(("key", "meant"), MOVED.items())
def test_a_key_that_has_moved_or_is_misspelt_is_answered_with_the_full_key_that_was_meant(
    file, key, meant
):
    with pytest.raises(ConfigError) as caught:
        load_config(file, [f"{key}=1"])
    said = str(caught.value)
    assert f"there is no key '{key}'" in said
    assert f"did you mean '{meant}'?" in said if meant else "did you mean" not in said


@pytest.mark.parametrize("content", ["[1, 2]", "a: [", "just text"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content):
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_config(tmp_path / "bad.yaml")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such configuration"):
        load_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize("words", [[], ["train.lr=0.5", "placement.train.workers=2"]])
def test_an_empty_section_has_its_defaults(file, words):
    file.write_text(file.read_text() + "train:\nplacement: {train: }\n")
    config = load_config(file, words)
    expected = (0.5, 2) if words else (declarations.TrainConfig().lr, 1)
    assert (config.train.lr, config.placement.train.workers) == expected


def test_runs_go_into_the_home_directory_where_no_root_is_given(file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "run": {"name": "x"}}))
    config = load_config(file)
    assert config.run.directory == tmp_path / "home" / "medusa-runs" / "x"


def test_a_chat_template_may_be_a_path_or_the_text_itself(file):
    (file.parent / "chat.jinja").write_text("{{ messages }}")
    assert (
        load_config(
            file, [f"target.chat_template={file.parent / 'chat.jinja'}"]
        ).target.chat_template
        == "{{ messages }}"
    )
    with pytest.raises(ConfigError, match="chat template cannot be read"):
        load_config(file, ["target.chat_template=absent.jinja"])


@pytest.mark.slow
@settings(max_examples=25)
@given(
    lr=st.floats(1e-8, 1.0),
    heads=st.integers(1, 10),
    text=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20),
)
def test_the_dumped_configuration_gives_the_same_run_again(tmp_path_factory, lr, heads, text):
    path = tmp_path_factory.mktemp("dump") / "run.yaml"
    path.write_text(MINIMAL)
    settings = yaml.safe_load(dump_config(load_config(path))) | {
        "train": {"lr": lr, "num_heads": heads}
    }
    settings["target"]["chat_template"] = "{" + text
    path.write_text(yaml.safe_dump(settings))
    config = load_config(path)
    path.write_text(dump_config(config))
    assert load_config(path) == config


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_bundled_configuration_is_valid(path):
    assert load_config(path).run.name


def test_every_key_is_read_somewhere():
    sources = [file.read_text() for file in (ROOT / "pipeline").rglob("*.py")]
    attributes = {
        node.attr
        for text in sources
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
    }
    classes = [
        value
        for value in vars(declarations).values()
        if isinstance(value, type) and issubclass(value, declarations.Section)
    ]
    placed_by_stage_name = {"generate", "features", "train"}
    for cls in classes:
        for key in cls.model_fields:
            assert key in attributes | placed_by_stage_name, f"{cls.__name__}.{key} is never read"


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("generate.engine_args={hf_token: not-to-be-shown}", "environment (HF_TOKEN) instead"),
        (
            "check.assistant_model=not-to-be-shown",
            "'check': the baseline 'assistant' and check.assistant_model",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_told_without_their_section_s_content(file, word, says):
    with pytest.raises(ConfigError) as refused:
        load_config(file, [word])
    assert says in str(refused.value) and "not-to-be-shown" not in str(refused.value)
