"""The time of stages by arithmetic, against products by hand and against measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, PretrainedConfig

from benchmarks.gpu_size import MISTRAL_7B
from pipeline.evaluation.gpu_figures import GPUS
from pipeline.execution.placement import Resources
from pipeline.run.estimate import RunSize, on_planned_gpus, target_sizes
from pipeline.run.hours import Hours, Rates
from pipeline.run.resolved import ResolvedRun
from tests.flows.tiny import resolved

ROOT = Path(__file__).parents[2]
H100 = GPUS["NVIDIA H100 80GB HBM3"]
TWO_CORES = Rates(operations=100e9, num_bytes=10e9)  # as the demo's training reached
DAY = 24 * 3600


@pytest.fixture
def hours_of(make_config, tmp_path):
    """`hours_of(target, rates, conversations, tokens, **settings)`, all trained on."""

    def make(
        target: PretrainedConfig, rates: Rates, conversations: int, tokens: int, **settings
    ) -> Hours:
        directory = tmp_path / "large"
        target.save_pretrained(directory)
        usual = {"target__model": str(directory), "train__batch_tokens": "auto"}
        config = make_config(tmp_path, **usual | settings)
        run: ResolvedRun = resolved(config).on(Resources(((2, 0),)))
        if rates is not TWO_CORES:
            run = on_planned_gpus(run)
        sizes = target_sizes(run)
        assert sizes is not None
        recipes = tuple(
            learner.expected_recipe(config.train, tokens, run.shape.hidden_size, run.kind)
            for _, learner in run.method.phases(config.train)
        )
        size = RunSize(conversations, 1, tokens, 0, 0, False, tokens, recipes)
        return Hours(run, size, sizes, dict.fromkeys(("generate", "features", "train"), rates))

    return make


def test_gemma_on_two_cores_trains_for_some_sixteen_hours(hours_of):
    """18 layers of 640, and 262,144 tokens: 185,000 positions in eight epochs, five steps each.

    A step multiplies the cell's 2 · 640² + 3 · 640 · 2,560 numbers three times and the lm_head's
    twice; the target's own logits are a third product with the lm_head per position.
    """
    gemma = Gemma3TextConfig(
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=262_144,
        architectures=["Gemma3ForCausalLM"],
    )
    defaults = {"train__heads": "recurrent", "train__num_heads": 5, "train__epochs": "auto"}
    hours = hours_of(gemma, TWO_CORES, 600, 185_000, **defaults, train__soft_labels=0.5)
    cell, lm_head = 2 * 640**2 + 3 * 640 * 2560, 262_144 * 640
    operations = 5 * (6 * cell + 4 * lm_head) + 2 * lm_head
    assert hours.training() == pytest.approx(8 * 185_000 * operations / 100e9, rel=0.01)
    assert 14 < hours.training() / 3600 < 18


def test_the_demo_takes_what_it_took(hours_of):
    """A factor of two of docs/images/demo-report.json in all, and of three in each stage.

    The two cores that recorded it did other work too, which a stage of seconds shows most.
    """
    seconds = json.loads((ROOT / "docs/images/demo-report.json").read_text())["seconds_by_stage"]
    target = LlamaConfig(
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=2048,
        dtype="float32",
        architectures=["LlamaForCausalLM"],
    )
    demo = {
        "train__heads": "medusa",
        "train__num_heads": 7,
        "train__epochs": 2,
        "train__batch_tokens": 512,
        "train__soft_labels": 0,
        "check__engines": ["native", "vllm"],
        "check__prompts": 32,
        "check__max_new_tokens": 64,
        "check__repeats": 3,
        "check__baselines": ["prompt-lookup", "retrieval"],
        "check__engine_baselines": ["ngram"],
    }
    found = hours_of(target, TWO_CORES, 340, 32_503, **demo).stages()
    assert set(found) == {"generate", "features", "train", "calibrate", "check"}
    for stage, expected in found.items():
        assert 1 / 3 < expected / seconds[stage] < 3, (stage, expected, seconds[stage])
    assert 0.5 < sum(found.values()) / sum(seconds[stage] for stage in found) < 2


def measured_on_h100() -> dict[str, float]:
    claims = json.loads((ROOT / "benchmarks/results/gpu.json").read_text())["claims"]
    found = {}
    for claim in claims:
        found[claim["what"]] = claim["measured"]
        found |= claim["sides"]
    return found


KINDS: dict[str, dict[str, Any]] = {
    "recurrent": {"train__heads": "recurrent"},
    "tied": {"train__heads": "medusa", "train__medusa": {"lm_head": "tied"}},
    "shared": {"train__heads": "medusa", "train__medusa": {"lm_head": "shared"}},
    "untied": {"train__heads": "medusa", "train__medusa": {"lm_head": "untied"}},
}


@pytest.mark.parametrize("vocabulary", [32_000, 128_256])
@pytest.mark.parametrize("kind", KINDS)
def test_training_on_an_h100_takes_what_it_took(hours_of, kind, vocabulary):
    """The aim is a factor of two of benchmarks/results/gpu.json, for Mistral-7B's shape."""
    target = MistralConfig(**MISTRAL_7B | {"vocab_size": vocabulary}, dtype="bfloat16")
    hours = hours_of(
        target,
        Rates.of_gpu(H100, 80e9),
        20_000,
        20_000_000,
        **KINDS[kind],
        train__num_heads=5,
        train__epochs=2,
        train__soft_labels=0.5,
        placement__gpu_memory_gb=80,
    )
    rate = measured_on_h100()[f"training 5 {kind} heads, V = {vocabulary:,}"]
    assert 0.5 < hours.training() / (2 * 20_000_000 / rate) < 2


def test_an_h100_caches_and_decodes_as_fast_as_it_did(hours_of):
    target = MistralConfig(**MISTRAL_7B, dtype="bfloat16", architectures=["MistralForCausalLM"])
    rates = Rates.of_gpu(H100, 80e9)
    hours = hours_of(target, rates, 20_000, 20_000_000, placement__gpu_memory_gb=80)
    found = measured_on_h100()
    assert 0.5 < hours.caching() / (26_000_000 / found["whole stage, tokens/s"]) < 2
    assert 0.5 < hours.plain_step("features") * found["plain, tokens/s"] < 2
