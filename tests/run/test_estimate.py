"""The memory of stages from a config.json, and what is refused for the lack of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from pipeline.errors import EnvironmentFault
from pipeline.execution.machine import GIB
from pipeline.execution.placement import Resources
from pipeline.flow import run_flow
from pipeline.run.estimate import (
    StageMemory,
    TargetSizes,
    check_memory,
    memory_of_stages,
    on_planned_gpus,
    target_sizes,
)
from pipeline.run.resolved import ResolvedRun
from tests.flows.tiny import resolved

# Llama-7B and Llama-3-70B: hidden, inner, layers, heads, KV heads, vocabulary.
SHAPES = {"7B": (4096, 11008, 32, 32, 32, 32000), "70B": (8192, 28672, 80, 64, 8, 128256)}
MEDUSA = {
    "train__heads": "medusa",
    "train__num_heads": 5,
    "train__batch_tokens": "auto",
    "train__precision": "auto",
}


@pytest.fixture
def plan_of(make_config, tmp_path):
    """`plan_of("70B", **settings)`: a configuration for GPUs of 80 GB, of a target that is a
    config.json alone.
    """

    def make(shape: str, quantization: dict | None = None, **changes) -> ResolvedRun:
        hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[shape]
        content = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            vocab_size=vocabulary,
            max_position_embeddings=8192,
            architectures=["LlamaForCausalLM"],
            dtype="bfloat16",
        ).to_dict()
        if quantization:
            content["quantization_config"] = quantization
        directory = tmp_path / shape
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(content))
        usual = {"target__model": str(directory), "placement__gpu_memory_gb": 80, **MEDUSA}
        return on_planned_gpus(resolved(make_config(tmp_path, **usual | changes)))

    return make


def sizes_of(run: ResolvedRun) -> TargetSizes:
    found = target_sizes(run)
    assert found is not None
    return found


def memory_of(run: ResolvedRun, name: str) -> StageMemory:
    found = memory_of_stages(run, sizes_of(run))
    return next(each for each in found if each.name == name)


@pytest.mark.parametrize(("shape", "parameters"), [("7B", 6_738_415_616), ("70B", 70_553_706_496)])
def test_parameters_are_those_that_the_authors_publish(plan_of, shape, parameters):
    config = plan_of(shape)
    assert sizes_of(config).parameters == parameters
    assert memory_of(config, "features").weights == 2 * parameters


def test_several_gpus_share_the_weights_and_quantization_shrinks_them(plan_of):
    """4 bits take a quarter, except embedding and lm_head, quantized on loading or in the files."""
    whole = memory_of(plan_of("7B"), "features").weights
    by_two = plan_of("7B", placement__features={"gpus_per_worker": 2})
    assert memory_of(by_two, "features").weights == whole / 2
    matrices = 2 * 32000 * 4096
    expected = pytest.approx((whole - 2 * matrices) / 4 + 2 * matrices, rel=0.01)
    assert memory_of(plan_of("7B", target__quantization="4bit"), "features").weights == expected
    in_files = plan_of("7B", {"quant_method": "gptq", "bits": 4, "group_size": 128})
    assert memory_of(in_files, "features").weights == expected


@pytest.mark.parametrize(("optimizer", "moments"), [("adamw", 8), ("adamw-8bit", 2)])
def test_heads_have_weights_gradients_and_two_moments(plan_of, optimizer, moments):
    train = memory_of(plan_of("70B", train__optimizer=optimizer), "train")
    numbers = 5 * 8192 * (8192 + 1 + 128256)
    assert (train.heads, train.gradients, train.optimizer) == (
        4 * numbers,
        4 * numbers,
        moments * numbers,
    )


def test_workers_share_the_layers_of_a_backbone_that_trains(plan_of):
    """An eighth of the decoder layers on each of eight; embedding and lm_head are whole."""
    eight = {"train__method": "medusa-2", "placement__train": {"workers": 8}}
    split = memory_of(plan_of("7B", train__backbone={"shard": True}, **eight), "train").weights
    matrices = 2 * 32000 * 4096
    assert split == pytest.approx(2 * ((6_738_415_616 - matrices) / 8 + matrices), rel=0.01)
    assert memory_of(plan_of("7B", **eight), "train").weights == 2 * 6_738_415_616


def check(run: ResolvedRun, *stages: str) -> None:
    check_memory(replace(run, open_stages=stages))


def test_what_misses_by_more_than_the_tolerance_is_refused(plan_of, tmp_path):
    """Heads of 70B alone take 83 GiB: within 20 % of 80 GB, and not of 60."""
    check(plan_of("70B"), "train")
    small = plan_of("70B", placement__gpu_memory_gb=60)
    with pytest.raises(EnvironmentFault, match=r"train.*train\.medusa\.lm_head.*train\.optimizer"):
        check(small, "train")
    check(small, "seeds")
    check(small)
    shared = {"train__medusa": {"lm_head": "shared"}, "placement__gpu_memory_gb": 60}
    check(plan_of("70B", **shared), "train")
    with pytest.raises(EnvironmentFault) as refused:
        run_flow(plan_of("7B", placement__gpu_memory_gb=2).config, executor="inline")
    assert refused.value.exit_code == 4 and "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_few_positions_make_small_batches_which_may_fit(plan_of):
    """The largest batches would not; 2 answers of 256 tokens to 40 prompts make small ones."""
    few = {"placement__gpu_memory_gb": 15, "train__heads": "recurrent"}
    check(plan_of("7B", **few), "train")
    with pytest.raises(EnvironmentFault, match="train"):
        check(plan_of("7B", train__batch_tokens=16384, **few), "train")


def test_workers_without_gpus_share_the_machine(plan_of, monkeypatch):
    monkeypatch.setattr("pipeline.run.estimate.machine_memory", lambda: 30.0 * GIB)
    one, four = (
        plan_of("7B", placement__gpu_memory_gb=None, placement__train={"workers": workers})
        for workers in (1, 4)
    )
    without = Resources(((8, 0),))
    check(one.on(without), "train")
    with pytest.raises(EnvironmentFault):
        check(four.on(without), "train")
