"""The stories in flows/, told with the tiny target and its seeds in place of the real ones."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from examples.demo_target import target as demo_target
from pipeline.config import Config
from pipeline.config.load import load_config
from pipeline.errors import ConfigError
from pipeline.evaluation import studies
from pipeline.flow import run_flow
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.shards import read_rows
from pipeline.targets.spec import TargetSpec, load_tokenizer
from tests.flows.tiny import save_seeds, stages_run

FLOWS = Path(__file__).parent.parent.parent / "flows"
EVERYTHING = ["seeds", "generate", "features", "train", "calibrate", "export", "check"]
WITH_BACKBONE = [
    "seeds",
    "generate",
    "features",
    "train",
    "tuned-features",
    "calibrate",
    "export",
    "check",
]


@pytest.fixture
def no_plots(unrendered_plots) -> None:
    """Plots are drawn of all studies, from what a flow has measured."""


@pytest.fixture
def story(tmp_path, tiny_target, tiny_seeds, monkeypatch):
    """`story("distill_zephyr", *words)` runs a flow on the tiny target, inline; its run is at
    `tmp_path`/<name>.
    """
    for figure, few in {
        "NUM_PROMPTS": 2,
        "TEMPERATURES": (0.7,),
        "EPS": (0.04, 0.25),
        "BATCH_SIZES": (1, 4),
    }.items():
        monkeypatch.setattr(studies, figure, few)

    def tell(name: str, *words: str, **options: str) -> None:
        spec = importlib.util.spec_from_file_location(name, FLOWS / f"{name}.py")
        assert spec and spec.loader
        module: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        inline = partial(run_flow, console=Console(quiet=True))
        module.run_flow = lambda *given, **more: inline(
            *given, **{**more, "executor": "inline", **options}
        )  # type: ignore
        first = [word for word in words if "=" not in word]
        small = [
            f"run.root={tmp_path}",
            f"target.model={tiny_target}",
            f"seeds.sources={tiny_seeds}",
            "generate.engine=transformers",
            "generate.max_new_tokens=16",
            "check.engines=[native]",
            "check.require_learning=false",  # of a random target
            "check.max_new_tokens=6",
            "check.repeats=1",
            "limits.min_free_disk_gb=0",
        ]
        monkeypatch.setattr(
            sys, "argv", [name, *first, *small, *(word for word in words if "=" in word)]
        )
        module.main()

    return tell


SHORT = (
    "train.backbone.sequence_length=96",
    "train.backbone.batch_sequences=8",
    "train.backbone.micro_batch=8",
)  # of Medusa-2's texts


@pytest.mark.slow
def test_zephyr_writes_both_sides_itself_and_learns_from_the_text(story, tmp_path):
    story("distill_zephyr", *SHORT)
    run = RunDirectory(tmp_path / "zephyr-7b")
    assert stages_run(run) == [stage for stage in WITH_BACKBONE if stage != "features"]
    rows = [row for path in run.latest("generate").shards() for row in read_rows(path)]
    assert {span["role"] for row in rows for span in row["spans"]} == {"assistant", "user"}
    assert len(run.latest("calibrate").summary["heads"]) == 5


@pytest.mark.slow
def test_vicuna_brings_the_chat_template_that_its_target_lacks(story, tmp_path):
    story("distill_vicuna", "vicuna-7b", *SHORT, "train.backbone.sequence_length=192")
    run = RunDirectory(tmp_path / "vicuna-7b")
    assert stages_run(run) == WITH_BACKBONE
    export = run.latest("export").path
    tokenizer = load_tokenizer(TargetSpec(str(export)))
    row = next(read_rows(run.latest("generate").shards()[0]))
    prompt = tokenizer.decode(row["input_ids"][: row["spans"][0]["start"]])
    assert "USER:" in prompt and prompt.endswith("ASSISTANT:")
    assert "USER:" in load_tokenizer(TargetSpec(str(export / "backbone"))).chat_template


def test_the_recipes_are_the_paper_s():
    """Appendix B: rates of heads and backbone, warmup, sequences; Medusa-2 in two stages for
    Vicuna-7B (FACTS).
    """
    keys = ("recipe", "schedule", "lambda_0", "lr", "sequence_length", "batch_sequences")
    alone = ("joint", "sine", 0.01, 1e-4, 2048, 128)
    expected = {
        "zephyr-7b": ((4e-4, 20), alone),
        "vicuna-33b": ((4e-4, 20), alone),
        "vicuna-7b": ((2e-3, 40), ("two-stage", "constant", 0.2, 5e-4, 2048, 64)),
    }
    for name, (heads, recipe) in expected.items():
        train = load_config(FLOWS.parent / "configs" / f"{name}.yaml").train
        assert (train.heads, train.method, train.lr, train.warmup_steps) == (
            "medusa",
            "medusa-2",
            *heads,
        )
        tuned = train.backbone
        assert (tuned.loss, tuned.lora_rank, tuned.lora_alpha) == ("kl", 32, 16)
        assert tuple(getattr(tuned, key) for key in keys) == recipe, name


def test_vicuna_without_its_first_word_says_so(story):
    with pytest.raises(ConfigError, match="first word names the configuration"):
        story("distill_vicuna", "train.lr=1")


@pytest.mark.slow
def test_the_demo_makes_its_target_from_the_train_split_once(
    story, tmp_path, tiny_target, monkeypatch
):
    made = []

    def copy_instead(conversations, directory: Path, *, seed: int, progress) -> dict:
        made.append([conversation.id for conversation in conversations])
        progress(1, 1, 2.5)
        shutil.copytree(tiny_target, directory)
        return {"parameters": 1, "steps": 1, "final_loss": 2.5, "seconds": 0.1}

    monkeypatch.setattr(demo_target, "train_demo_target", copy_instead)
    words = (
        f"target.model={tmp_path / 'demo-target'}",
        "check.min_acceleration_rate=1",
        "check.prompts=8",
    )
    story("demo", *words)
    run = RunDirectory(tmp_path / "demo")
    assert stages_run(run) == EVERYTHING[1:]  # the second call of two: the seeds are kept
    train = [
        row["id"]
        for path in run.latest("seeds").shards()
        for row in read_rows(path)
        if row["split"] == "train"
    ]
    assert made == [train]
    story("demo", *words)
    assert len(made) == 1 and stages_run(run) == []
    story("demo", *words, f"seeds.sources={save_seeds(tmp_path / 'more.jsonl', 50)}", until="seeds")
    assert len(made) == 2 and len(made[1]) == 34


@pytest.mark.parametrize("name", ["demo-medusa-2", "demo-recurrent"])
def test_the_demos_are_alike_but_for_their_training(name: str):
    one, two = (load_config(FLOWS.parent / "configs" / f"{name}.yaml") for name in ("demo", name))
    for section in type(one).model_fields:
        if section not in ("run", "train", "calibrate", "check"):
            assert getattr(one, section) == getattr(two, section), section
    assert one.calibrate == two.calibrate.model_copy(
        update={"draft_tokens": one.calibrate.draft_tokens}
    )
    assert one.check == two.check.model_copy(
        update={"studies": one.check.studies, "baselines": one.check.baselines}
    )
    assert two.run.store == one.run.directory and two.run.directory.name == name


@pytest.mark.slow
def test_the_second_demo_takes_target_and_text_from_the_first(
    story, tmp_path, tiny_target, monkeypatch
):
    monkeypatch.setattr(
        demo_target, "train_demo_target", None
    )  # somebody's own model is not trained
    words = (
        f"target.model={tiny_target}",
        "check.min_acceleration_rate=1",
        "check.prompts=4",
        "check.studies=[]",
    )
    story("demo", *words, until="generate")
    story(
        "demo",
        "medusa-2",
        *words,
        *SHORT,
        f"run.store={tmp_path / 'demo'}",
        "train.backbone.max_kl=9",
    )
    run = RunDirectory(tmp_path / "demo-medusa-2")
    assert stages_run(run) == ["train", "tuned-features", "calibrate", "export", "check"]
    for stage in ("seeds", "generate"):
        assert run.latest(stage).path == RunDirectory(tmp_path / "demo").latest(stage).path


def test_a_demo_of_no_method_says_so(story):
    with pytest.raises(ConfigError, match="no demo of 'medusa-3'"):
        story("demo", "medusa-3")


@pytest.fixture
def demo(make_config, tmp_path) -> tuple[RunDirectory, Config]:
    config = make_config(tmp_path, target__model=str(tmp_path / "target"))
    return run_flow(config, until="seeds", executor="inline", console=Console(quiet=True)), config


def test_somebody_s_own_model_is_never_trained_over(demo, tiny_target, monkeypatch):
    run, config = demo
    shutil.copytree(tiny_target, config.target.model)
    monkeypatch.setattr(demo_target, "train_demo_target", None)
    demo_target.ensure_demo_target(run, config)


def test_a_target_whose_training_was_interrupted_is_trained_again(demo, tiny_target, monkeypatch):
    run, config = demo
    facts = {"parameters": 1, "steps": 1, "final_loss": 2.5, "seconds": 0.1}

    def interrupted(conversations, directory, **_):
        raise KeyboardInterrupt

    def finished(conversations, directory, **_):
        shutil.copytree(tiny_target, directory)
        return facts

    monkeypatch.setattr(demo_target, "train_demo_target", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo_target.ensure_demo_target(run, config)
    monkeypatch.setattr(demo_target, "train_demo_target", finished)
    demo_target.ensure_demo_target(run, config)
    mark = json.loads((Path(config.target.model) / demo_target.MARK).read_text())
    assert mark["made_from"]["seeds"] == run.latest("seeds").content and mark["final_loss"] == 2.5
