"""Frozen layers sharded over two workers, this process and another: training equals that of whole
layers bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.targets.lora import decoder_layers
from pipeline.targets.spec import TargetSpec
from pipeline.training.task import TrainSpec, Workers
from pipeline.training.trainer import train
from tests.training.trainings import Stopped, same_curve, same_weights, stop_at, trainer_of
from tests.training.two_workers import train_as_two


@pytest.fixture(scope="module")
def layered(tmp_path_factory) -> TargetSpec:
    """A target of several layers with a tied lm_head; its matrices do not halve evenly."""
    torch.manual_seed(4)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 45, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, tie_word_embeddings=True))
    directory = tmp_path_factory.mktemp("layered")
    model.save_pretrained(directory)
    return TargetSpec(str(directory))


@pytest.fixture
def make(make_tuning, layered):
    """A maker of trainings; in most steps and held out, this worker has one of three sequences."""
    usual = {"lora_dropout": 0.3, "epochs": 2, "sequence_length": 40, "batch_sequences": 3}
    usual["max_grad_norm"] = 0.5
    return lambda name, **settings: replace(
        make_tuning(name, **{**usual, **settings}), target=layered
    )


def train_and_count(specs: tuple[TrainSpec, ...], workers: Workers) -> None:
    """Train each, and write down the frozen elements that this worker holds, before and after a
    step.
    """
    for spec in specs:
        train(spec, workers)
    trainer = trainer_of(specs[-1], workers)
    counts = [num_held(trainer.learner.backbone)]
    trainer.step(0, next(trainer.learner.steps(0)))
    counts.append(num_held(trainer.learner.backbone))
    (specs[-1].path / f"held-{workers.rank}.json").write_text(json.dumps(counts))


def train_and_interrupt(specs: tuple[TrainSpec, ...], workers: Workers) -> None:
    """Train the first, and the second with a break in the same step on both workers."""
    whole, broken = specs
    train(whole, workers)
    with pytest.raises(Stopped):
        train(broken, workers, stop_at(7))
    assert not broken.heads_path.exists()
    train(broken, workers)


def num_held(model: nn.Module) -> int:
    """The elements of the layers' frozen weights on this worker."""
    total = 0
    for layer in decoder_layers(model):
        for weight in layer.parameters():
            if isinstance(weight, DTensor):
                total += weight.to_local().numel()
            elif not weight.requires_grad:
                total += weight.numel()
    return total


@pytest.mark.slow
def test_sharded_layers_train_as_whole_ones_in_half_the_memory(make, tmp_path, layered):
    settings = {"gradient_checkpointing": True, "micro_batch": 2}
    whole, split = make("whole", **settings), make("split", shard=True, **settings)
    train_as_two(train_and_count, (whole, split), tmp_path)
    assert same_weights(whole, split) and same_curve(whole.path, split.path)
    half = num_held(LlamaForCausalLM.from_pretrained(layered.model).requires_grad_(False)) / 2
    for rank in range(2):
        before, after = json.loads((split.path / f"held-{rank}.json").read_text())
        assert before == after == pytest.approx(half, rel=0.03)  # an odd row more or less


@pytest.mark.slow
def test_an_interrupted_sharded_training_ends_as_a_whole_one(make, tmp_path):
    whole, broken = make("whole", shard=True), make("broken", shard=True)
    train_as_two(train_and_interrupt, (whole, broken), tmp_path)
    assert same_weights(whole, broken) and same_curve(whole.path, broken.path)
