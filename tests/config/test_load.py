"""Settings are strict data: unknown keys are named, paths mean what their place says, and a dump
gives the same run.
"""

import ast
import shlex
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


def test_paths_are_relative_to_the_file(file):
    """Every key that may be a path; in an override, to the working directory."""
    content = yaml.safe_load(file.read_text())
    keys = []
    for section, declared in declarations.Config.model_fields.items():
        for key, field in declared.annotation.model_fields.items():
            if Path in (field.annotation, *get_args(field.annotation)):
                keys.append((section, key))
                content.setdefault(section, {})[key] = "there"
    assert len(keys) >= 4
    file.write_text(yaml.safe_dump(content))
    config = load_config(file)
    found = config.model_dump()
    assert {found[section][key] for section, key in keys} == {file.parent / "there"}
    assert config.target.model == str(file.parent / "target")
    assert config.seeds.sources[0].path == file.parent / "seeds.jsonl"


@pytest.mark.parametrize("key", ["run.name", "run.root"])
@pytest.mark.parametrize("word", ["off", "null", "1.5", "2026-11-28"])
def test_text_that_yaml_reads_otherwise_needs_quotes(file, key, word):
    """The message gives the quoted override, which is then accepted."""
    with pytest.raises(ConfigError, match="YAML") as refused:
        load_config(file, [f"{key}={word}"])
    quoted = f"{key}='\"{word}\"'"
    assert f"{key}='\"TEXT\"'" in str(refused.value)
    (override,) = shlex.split(quoted)
    section, name = key.split(".")
    found = getattr(getattr(load_config(file, [override]), section), name)
    assert str(found).rpartition("/")[2] == word


def test_bundled_name_is_used_where_no_such_file_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("zephyr-7b") == load_config(ROOT / "configs" / "zephyr-7b.yaml")
    assert load_config("qwen2.5-7b.yaml") == load_config(ROOT / "configs" / "qwen2.5-7b.yaml")
    (tmp_path / "zephyr-7b").write_text(MINIMAL)
    assert load_config("zephyr-7b").run.name == "trial"
    (tmp_path / "vicuna-7b").mkdir()
    assert load_config("vicuna-7b").run.name == "vicuna-7b", "a model's directory is none"
    with pytest.raises(ConfigError, match=r"cannot be read: .*Is a directory"):
        load_config(tmp_path / "vicuna-7b")
    for name in ("zephyr", "conf/vicuna-7b"):
        with pytest.raises(ConfigError, match=r"no such .* one of demo, .*zephyr-7b"):
            load_config(name)


def test_paths_in_an_override_are_relative_to_the_working_directory(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(file, ["seeds.sources=mine.json", "run.root=out", "target.model=./other"])
    assert config.seeds.sources[0].path == tmp_path / "mine.json"
    assert config.run.root == tmp_path / "out"
    assert config.target.model == str(tmp_path / "other")
    assert load_config(file, ["target.model=owner/name"]).target.model == "owner/name"
    tree = load_config(file, ["calibrate.choices=tree.json"]).calibrate.choices
    assert tree == tmp_path / "tree.json"
    tree = load_config(file, ["calibrate.choices=[[0], [0, 1]]"]).calibrate.choices
    assert tree == ((0,), (0, 1))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("train.num_haeds=3", "did you mean 'train.num_heads'"),
        ("seeds.sources=[{paht: x}]", "did you mean 'seeds.sources.path'"),
        ("train.lr=fast", "'train.lr'"),
        ("placement.gpu_tflops=989", "give gpu_tflops and gpu_bandwidth_gbs together"),
        ("calibrate.choices=[[0], [a]]", "'calibrate.choices.1.0': it must be a valid integer"),
        ("nonsense", "is not an override"),
        (
            "train.lr.x=1",
            "'train.lr': it must be a valid number or it must be 'auto', not {\"x\": 1}",
        ),
        ("generate.rounds=2024-01-02", 'it must be a valid integer, not "2024-01-02"'),
        ("train.roles=5", "it must be a list, such as [a, b], not 5"),
        ("run.name.x=1", "is a value, not a section"),
        ("train.lr=.inf", "'train.lr'"),
        ("train.epoch=3", "trial.yaml, train.epoch)"),
        ("generate.engine_args={hf_token: not-to-be-shown}", "hf_token would be written"),
        ("generate.engine_args={x: ['http://me:word@host']}", "generate.engine_args.x holds"),
        ("check.assistant_model=not-to-be-shown", "'check': "),
        ("target.template_arguments={messages: []}", "template"),
    ],
)
def test_a_mistake_is_named_in_one_paragraph(file, word, says):
    with pytest.raises(ConfigError) as caught:
        load_config(file, [word])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value) and "not-to-be-shown" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("word", ["generate.temperature=0", "generate.mode=passthrough"])
def test_samples_that_would_all_be_alike_are_refused(file, word):
    assert load_config(file, [word]).generate.samples == "auto"
    with pytest.raises(ConfigError, match="samples above 1 needs"):
        load_config(file, [word, "generate.samples=2"])


MOVED = {
    "train.num_layers": "train.medusa.num_layers",
    "train.backbone.lorarank": "train.backbone.lora_rank",
    "train.lern_rate": None,
}


@pytest.mark.parametrize(("key", "meant"), MOVED.items())
def test_an_unknown_key_suggests_the_nearest_one(file, key, meant):
    with pytest.raises(ConfigError) as caught:
        load_config(file, [f"{key}=1"])
    said = str(caught.value)
    assert f"there is no key '{key}'" in said
    assert f"did you mean '{meant}'?" in said if meant else "did you mean" not in said


@pytest.mark.parametrize("content", ["[1, 2]", "a: [", "just text", None])
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_config(tmp_path / "bad.yaml")


def test_an_empty_section_has_its_defaults(file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    content = yaml.safe_load(file.read_text()) | {"train": None, "run": {"name": "x"}}
    file.write_text(yaml.safe_dump(content | {"placement": {"train": None}}))
    config = load_config(file, ["placement.train.workers=2"])
    assert config.train == declarations.TrainConfig() and config.placement.train.workers == 2
    assert config.run.directory == tmp_path / "home/medusa-runs/x"


def test_a_chat_template_may_be_a_path_or_its_text(file):
    (file.parent / "chat.jinja").write_text("{{ messages }}")
    word = f"target.chat_template={file.parent / 'chat.jinja'}"
    assert load_config(file, [word]).target.chat_template == "{{ messages }}"
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
    read = {"generate", "features", "train"}  # of placement, by the stage's name
    for file in (ROOT / "pipeline").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
    for value in vars(declarations).values():
        if isinstance(value, type) and issubclass(value, declarations.Section):
            assert not value.model_fields.keys() - read, value.__name__
