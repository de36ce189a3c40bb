"""The stories in flows/, told with the tiny target and its seeds in place of the real ones."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo_target import target as demo_target
from pipeline.config.load import load_config
from pipeline.errors import ConfigError
from pipeline.flow import run_flow
from pipeline.stages import calibrate
from pipeline.storage.run_directory import RunDirectory
from pipeline.targets.spec import TargetSpec, load_tokenizer
from tests.flows.tiny import save_seeds, stages_run, stored

FLOWS = Path(__file__).parent.parent.parent / "flows"
EVERYTHING = ["seeds", "generate", "features", "train", "calibrate", "export", "check"]
WITH_BACKBONE = [*EVERYTHING[:4], "tuned-features", *EVERYTHING[4:]]
FACTS = {"parameters": 1, "steps": 1, "final_loss": 2.5, "seconds": 0.1}
SMALL_CHECK = ("check.min_acceleration_rate=0", "check.prompts=4")
SHORT = (
    "train.backbone.sequence_length=96",
    "train.backbone.batch_sequences=8",
    "train.backbone.micro_batch=8",
)  # of Medusa-2's texts


@pytest.fixture
def story(tmp_path, tiny_target, tiny_seeds, monkeypatch):
    """`story("distill_zephyr", *words)` runs a flow on the tiny target, inline; its run is at
    `tmp_path`/<name>.
    """
    monkeypatch.setattr(calibrate, "NUM_PROMPTS", 1)

    def tell(name: str, *words: str, **options: str) -> None:
        def inline(*given: object, **asked: str) -> RunDirectory:
            return run_flow(*given, **asked | quiet | options)

        quiet = {"executor": "inline", "console": Console(quiet=True)}
        module = importlib.import_module(f"flows.{name}")
        monkeypatch.setattr(module, "run_flow", inline)
        first = [word for word in words if "=" not in word]
        changes = [word for word in words if "=" in word]
        small = [
            f"run.root={tmp_path}",
            f"target.model={tiny_target}",
            f"seeds.sources={tiny_seeds}",
            "generate.engine=transformers",
            "generate.samples=1",
            "generate.max_new_tokens=16",
            "check.engines=[native]",
            "check.min_acceleration_rate=0",  # of a random target
            "check.max_new_tokens=6",
            "check.repeats=1",
            "limits.min_free_disk_gb=0",
        ]
        monkeypatch.setattr(sys, "argv", [name, *first, *small, *changes])
        module.main()

    return tell


@pytest.mark.slow
def test_zephyr_writes_both_sides_itself_and_learns_from_the_text(story, tmp_path):
    story("distill_zephyr", *SHORT)
    run = RunDirectory(tmp_path / "zephyr-7b")
    assert stages_run(run) == [stage for stage in WITH_BACKBONE if stage != "features"]
    rows = stored(run.latest("generate"))
    assert {span["role"] for row in rows for span in row["spans"]} == {"assistant", "user"}
    assert len(run.latest("calibrate").summary["heads"]) == 5


@pytest.mark.slow
def test_vicuna_brings_the_chat_template_that_its_target_lacks(story, tmp_path):
    story("distill_vicuna", "vicuna-7b", *SHORT, "train.backbone.sequence_length=192")
    run = RunDirectory(tmp_path / "vicuna-7b")
    assert stages_run(run) == WITH_BACKBONE
    export = run.latest("export").path
    tokenizer = load_tokenizer(TargetSpec(str(export)))
    row = stored(run.latest("generate"))[0]
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
        assert (train.method, train.lr, train.warmup_steps) == ("medusa-2", *heads)
        tuned = train.backbone
        assert (tuned.loss, tuned.lora_rank, tuned.lora_alpha) == ("kl", 32, 16)
        assert tuple(getattr(tuned, key) for key in keys) == recipe, name


@pytest.mark.parametrize("words", [("distill_vicuna", "train.lr=1"), ("demo", "medusa-3")])
def test_a_flow_without_a_known_first_word_is_refused(story, words):
    with pytest.raises(ConfigError):
        story(*words)


@pytest.mark.slow
def test_the_demo_trains_its_target_once_on_the_train_split(
    story, tmp_path, tiny_target, monkeypatch
):
    made = []

    def copy_instead(conversations, directory: Path, *, seed: int, progress) -> dict:
        made.append([conversation.id for conversation in conversations])
        if len(made) == 1:
            raise KeyboardInterrupt
        shutil.copytree(tiny_target, directory)
        return FACTS

    monkeypatch.setattr(demo_target, "train_demo_target", copy_instead)
    words = (f"target.model={tmp_path / 'demo-target'}", *SMALL_CHECK)
    with pytest.raises(KeyboardInterrupt):
        story("demo", *words)
    story("demo", *words)
    run = RunDirectory(tmp_path / "demo")
    assert stages_run(run) == EVERYTHING[1:]  # the second call of two: the seeds are kept
    seeds = run.latest("seeds")
    trained_on = [row["id"] for row in stored(seeds) if row["split"] == "train"]
    assert made == [trained_on, trained_on]
    mark = json.loads((tmp_path / "demo-target" / demo_target.MARK).read_text())
    assert mark["made_from"]["seeds"] == seeds.content
    story("demo", *words)
    assert len(made) == 2 and stages_run(run) == []
    story("demo", *words, f"seeds.sources={save_seeds(tmp_path / 'more.jsonl', 50)}", until="seeds")
    assert len(made) == 3 and len(made[2]) == 34


@pytest.mark.parametrize("name", ["demo-medusa-2", "demo-recurrent"])
def test_the_demos_are_alike_but_for_their_training(name: str):
    one, two = (load_config(FLOWS.parent / "configs" / f"{name}.yaml") for name in ("demo", name))
    for section in ("target", "seeds", "generate", "features", "export", "limits", "push"):
        assert getattr(one, section) == getattr(two, section), section
    assert two.run.store == one.run.directory and two.run.directory.name == name
