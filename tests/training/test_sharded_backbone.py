"""Frozen layers and heads split over two workers, this process and another: the training is that of
whole ones, to the bit, also where micro-batches accumulate."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.errors import ConfigError
from pipeline.targets.lora import decoder_layers
from pipeline.targets.spec import TargetSpec
from pipeline.training.task import TrainSpec, Workers
from pipeline.training.trainer import train
from tests.training.trainings import Stopped, same_curve, same_weights, stop_at, trainer_of
from tests.training.two_workers import train_as_two


@pytest.fixture(scope="module")
def layered(tmp_path_factory) -> TargetSpec:
    """A target of several layers, whose lm_head is its embedding; its matrices do not halve
    evenly.
    """
    torch.manual_seed(4)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 45, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, tie_word_embeddings=True))
    model.save_pretrained(directory := tmp_path_factory.mktemp("layered"))
    return TargetSpec(str(directory))


@pytest.fixture
def make(make_tuning, layered):
    """In most steps, and of the held-out text, this worker has one sequence, and the other two."""
    usual = {
        "lora_dropout": 0.3,
        "epochs": 2,
        "sequence_length": 40,
        "batch_sequences": 3,
        "max_grad_norm": 0.5,
    }
    return lambda name, **settings: replace(
        make_tuning(name, **{**usual, **settings}), target=layered
    )


def train_and_count(specs: tuple[TrainSpec, ...], workers: Workers) -> None:
    """Train each, and write down how many frozen elements of the layers this worker then holds,
    before and in steps.
    """
    for spec in specs:
        train(spec, workers)
    trainer = trainer_of(specs[-1], workers)
    counts = [held(trainer.learner.backbone)]
    trainer.step(0, next(trainer.learner.steps(0)))
    counts.append(held(trainer.learner.backbone))
    (specs[-1].path / f"held-{workers.rank}.json").write_text(json.dumps(counts))


def train_and_interrupt(specs: tuple[TrainSpec, ...], workers: Workers) -> None:
    """Train the first, and the second with a break; both workers stop in the same step, as Ray
    Train ends a group.
    """
    whole, broken = specs
    train(whole, workers)
    with pytest.raises(Stopped):
        train(broken, workers, stop_at(7))
    assert not broken.heads_path.exists()
    train(broken, workers)


def held(backbone: nn.Module) -> int:
    frozen = [
        weight
        for layer in decoder_layers(backbone)
        for weight in layer.parameters()
        if not weight.requires_grad
    ]
    return sum(
        (weight.to_local() if isinstance(weight, DTensor) else weight).numel() for weight in frozen
    )


@pytest.mark.slow
def test_the_weights_are_those_of_whole_layers_and_each_worker_holds_half_of_them(
    make, tmp_path, layered
):
    whole, split = make("whole"), make("split", shard=True)
    train_as_two(train_and_count, (whole, split), tmp_path)
    assert same_weights(whole, split)
    assert same_curve(whole.path, split.path)
    model = LlamaForCausalLM.from_pretrained(layered.model)
    half = (
        sum(weight.numel() for layer in decoder_layers(model) for weight in layer.parameters()) / 2
    )
    for rank in range(2):
        before, after = json.loads((split.path / f"held-{rank}.json").read_text())
        assert (
            before == after == pytest.approx(half, rel=0.03)
        )  # one row more or less of what is odd


@pytest.mark.slow
def test_an_interrupted_training_of_split_layers_ends_with_the_weights_of_whole_ones(
    make, tmp_path
):
    settings = {"gradient_checkpointing": True, "micro_batch": 2, "precision": "bf16"}
    whole, broken = make("whole", **settings), make("broken", shard=True, **settings)
    whole, broken = (
        replace(spec, target=replace(spec.target, dtype="bfloat16")) for spec in (whole, broken)
    )
    train_as_two(train_and_interrupt, (whole, broken), tmp_path)
    assert same_weights(whole, broken)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_workers_run_equally_many_batches_of_which_some_hold_nothing(make, micro_batch):
    """A worker that ran fewer would leave the others waiting for its part of a layer."""
    learners = [
        trainer_of(make("any", micro_batch=micro_batch), Workers(rank, 2)).learner
        for rank in range(2)
    ]
    numbers = set()
    for step in range(learners[0].recipe.steps_per_epoch):
        shares = [list(learner.batches(step)) for learner in learners]
        assert len(shares[0]) == len(shares[1]) > 0
        numbers |= {len(batch.texts.next_N) for share in shares for batch in share}
    assert (0 in numbers) is (micro_batch == 1)


@pytest.mark.slow
def test_one_worker_has_nothing_to_split(make):
    whole, alone = make("whole", epochs=1), make("alone", epochs=1, shard=True)
    for spec in (whole, alone):
        train(spec)
    assert same_weights(whole, alone)


def test_a_target_without_layers_to_split_is_refused():
    with pytest.raises(ConfigError, match=r"no decoder layers.*train\.backbone\.shard"):
        decoder_layers(nn.Sequential(nn.Linear(2, 2)))
