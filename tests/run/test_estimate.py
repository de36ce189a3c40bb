"""The memory of stages from a config.json, and what is refused for the lack of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.config import Config
from pipeline.errors import EnvironmentFault
from pipeline.execution.machine import GIB
from pipeline.run.estimate import (
    StageMemory,
    TargetSizes,
    check_memory,
    memory_of_stages,
    target_sizes,
)
from tests.fake_cuda.ledger import Ledger

# Llama-7B and Llama-3-70B: hidden, inner, layers, heads, KV heads, vocabulary.
SHAPES = {"7B": (4096, 11008, 32, 32, 32, 32000), "70B": (8192, 28672, 80, 64, 8, 128256)}
MEDUSA = {
    "train__heads": "medusa",
    "train__num_heads": 5,
    "train__batch_tokens": "auto",
    "train__precision": "auto",
}


@pytest.fixture
def planned(make_config, tmp_path):
    """`planned("70B", **settings)`: a configuration for GPUs of 80 GB, of a target that is a
    config.json alone.
    """

    def make(shape: str, quantization: dict | None = None, **changes) -> Config:
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
        return make_config(tmp_path, **usual | changes)

    return make


def sizes_of(config: Config) -> TargetSizes:
    found = target_sizes(config)
    assert found is not None
    return found


def memory_of(config: Config, name: str, positions: int | None = None) -> StageMemory:
    found = memory_of_stages(config, sizes_of(config), positions)
    return next(each for each in found if each.name == name)


@pytest.mark.parametrize(("shape", "parameters"), [("7B", 6_738_415_616), ("70B", 70_553_706_496)])
def test_parameters_are_those_that_the_authors_publish(planned, shape, parameters):
    config = planned(shape)
    assert sizes_of(config).parameters == parameters
    assert memory_of(config, "features").weights == 2 * parameters


def test_a_conversation_caches_two_vectors_per_layer_and_head(planned):
    assert memory_of(planned("7B"), "generate").cache == 4096 * (2 * 32 * 32 * 128 * 2)
    assert memory_of(planned("70B"), "generate").cache == 4096 * (2 * 80 * 8 * 128 * 2)


def test_several_gpus_share_the_weights_and_quantization_shrinks_them(planned):
    """In 4 bit a quarter, but for embedding and lm_head, whether on loading or in the files."""
    whole = memory_of(planned("7B"), "features").weights
    by_two = planned("7B", placement__features={"gpus_per_worker": 2})
    assert memory_of(by_two, "features").weights == whole / 2
    matrices = 2 * 32000 * 4096
    expected = pytest.approx((whole - 2 * matrices) / 4 + 2 * matrices, rel=0.01)
    assert memory_of(planned("7B", target__quantization="4bit"), "features").weights == expected
    in_files = planned("7B", {"quant_method": "gptq", "bits": 4, "group_size": 128})
    assert memory_of(in_files, "features").weights == expected


@pytest.mark.parametrize(("optimizer", "moments"), [("adamw", 8), ("adamw-8bit", 2)])
def test_heads_have_weights_gradients_and_two_moments(planned, optimizer, moments):
    train = memory_of(planned("70B", train__optimizer=optimizer), "train")
    numbers = 5 * 8192 * (8192 + 1 + 128256)
    assert (train.heads, train.gradients, train.optimizer) == (
        4 * numbers,
        4 * numbers,
        moments * numbers,
    )


def test_workers_share_the_layers_of_a_backbone_that_trains(planned):
    """An eighth of the decoder layers on each of eight; embedding and lm_head are whole."""
    eight = {"train__method": "medusa-2", "placement__train": {"workers": 8}}
    split = memory_of(planned("7B", train__backbone={"shard": True}, **eight), "train").weights
    matrices = 2 * 32000 * 4096
    assert split == pytest.approx(2 * ((6_738_415_616 - matrices) / 8 + matrices), rel=0.01)
    assert memory_of(planned("7B", **eight), "train").weights == 2 * 6_738_415_616


@pytest.mark.slow
def test_a_forward_takes_about_what_is_planned(planned, monkeypatch):
    """Counted while two layers of a sixteenth of the width run, all of whose operations are
    real.
    """
    shape = {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2, vocab_size=64)).to(
        torch.bfloat16
    )
    with torch.inference_mode(), Ledger() as ledger:
        model.base_model(input_ids=torch.zeros(1, 4096, dtype=torch.long), use_cache=False)
    found = memory_of(planned("7B"), "features").activations / 16
    assert found == pytest.approx(ledger.peak["cpu"], rel=0.3)


def test_what_misses_by_more_than_the_tolerance_is_refused_before_a_run(planned):
    """Heads of 70B alone take 83 GiB: within 20 % of 80 GB, and not of 60."""
    stages = ["seeds", "generate", "features", "train", "check"]
    spread = {f"placement__{stage}": {"gpus_per_worker": 4} for stage in ("generate", "features")}
    check_memory(planned("70B", **spread), stages)
    small = planned("70B", placement__gpu_memory_gb=60, **spread)
    with pytest.raises(
        EnvironmentFault, match=r"train.*train\.medusa\.lm_head.*train\.optimizer"
    ) as refused:
        check_memory(small, stages)
    assert refused.value.exit_code == 4 and "\n" not in str(refused.value)
    assert not Path(small.run.directory).exists()
    check_memory(
        planned("70B", train__medusa={"lm_head": "shared"}, placement__gpu_memory_gb=60, **spread),
        stages,
    )


def test_a_finished_stage_is_not_refused(planned, tmp_path):
    config = planned("70B", placement__gpu_memory_gb=20)
    finished = tmp_path / "run" / "train-0123"
    finished.mkdir(parents=True)
    (finished / "DONE.json").touch()
    check_memory(config, ["train"])
    with pytest.raises(EnvironmentFault):
        check_memory(config, ["train"], fresh="train")


def test_workers_without_gpus_share_the_machine(planned, monkeypatch):
    monkeypatch.setattr("pipeline.run.estimate.num_gpus", lambda: 0)
    monkeypatch.setattr("pipeline.run.estimate.machine_memory", lambda: 30.0 * GIB)
    one, four = (
        planned("7B", placement__gpu_memory_gb=None, placement__train={"workers": workers})
        for workers in (1, 4)
    )
    check_memory(one, ["train"])
    with pytest.raises(EnvironmentFault, match="this machine"):
        check_memory(four, ["train"])


def test_few_positions_make_small_batches_which_may_fit(planned):
    """They are counted only where the largest batches do not fit."""
    counted = []

    def count() -> int:
        counted.append(40_000)
        return 40_000

    settings = {"train__heads": "recurrent"}
    check_memory(planned("7B", **settings), ["train"], count_positions=count)
    assert not counted
    small = planned("7B", placement__gpu_memory_gb=15, **settings)
    check_memory(small, ["train"], count_positions=count)
    assert counted
    with pytest.raises(EnvironmentFault, match="train"):
        check_memory(small, ["train"])


def test_as_many_workers_as_gpus_share_a_batch(planned, monkeypatch):
    monkeypatch.setattr("pipeline.run.estimate.gpu_memory", lambda: 80.0 * GIB)
    monkeypatch.setattr("pipeline.run.estimate.num_gpus", lambda: 8)
    auto, eight, one = (
        memory_of(
            planned("70B", placement__gpu_memory_gb=None, placement__train={"workers": workers}),
            "train",
        )
        for workers in ("auto", 8, 1)
    )
    assert auto == eight and auto.activations < one.activations
