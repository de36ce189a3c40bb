"""Heads split over two workers, this process and another: the training is that of whole heads, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.training.metrics import read_metrics
from pipeline.training.phases import train
from pipeline.training.task import TrainSpec, Workers
from tests.training.trainings import Stopped, stop_at
from tests.training.two_workers import train_as_two

RECIPES: dict[str, dict[str, Any]] = {
    "untied": {"heads": "medusa", "soft_labels": 0.5, "max_grad_norm": 0.05, "weight_decay": 0.1},
    "uneven": {"heads": "medusa", "draft_vocab": 23, "num_heads": 2, "precision": "bf16"},
    "8-bit": {"heads": "medusa", "optimizer": "adamw-8bit", "noise": 0.1},
    "shared": {"heads": "medusa", "lm_head": "shared", "soft_labels": 0.5, "max_grad_norm": 0.1},
    "recurrent": {"heads": "recurrent", "soft_labels": 0.5, "max_grad_norm": 0.1, "precision": "bf16"},
}


def train_each(specs: tuple[TrainSpec, ...], workers: Workers) -> None:
    for spec in specs:
        train(spec, workers)


def train_broken(specs: tuple[TrainSpec, ...], workers: Workers) -> None:
    """Train the first; the others until both workers stop in the same step; then the second to its end."""
    whole, broken, _ = specs
    train(whole, workers)
    for spec in specs[1:]:
        with pytest.raises(Stopped):
            train(spec, workers, stop_at(7))
        assert not spec.heads_path.exists()
    train(broken, workers)


def heads_file(spec: TrainSpec) -> bytes:
    return spec.heads_path.read_bytes()


@pytest.mark.slow
def test_split_heads_of_every_kind_learn_the_weights_of_whole_ones(make_spec, tmp_path):
    pairs = [
        [make_spec(f"{name}-{split}", shard_heads=split, **recipe) for split in (False, True)]
        for name, recipe in RECIPES.items()
    ]
    train_as_two(train_each, tuple(spec for pair in pairs for spec in pair), tmp_path)
    for whole, split in pairs:
        assert heads_file(whole) == heads_file(split), split.directory
        for one, other in zip(read_metrics(whole.path), read_metrics(split.path), strict=True):
            assert one | {"tokens_per_second": 0} == other | {"tokens_per_second": 0}


@pytest.mark.slow
def test_an_interrupted_training_goes_on_from_its_parts_with_as_many_workers_or_with_one(make_spec, tmp_path):
    recipe = {"heads": "medusa", "soft_labels": 0.5, "num_heads": 2}
    whole, *split = (make_spec(name, shard_heads=name != "whole", **recipe) for name in ("whole", "broken", "fewer"))
    broken, fewer = split
    train_as_two(train_broken, (whole, broken, fewer), tmp_path)
    assert heads_file(whole) == heads_file(broken)
    parts = sorted(path.name for path in fewer.path.glob("checkpoints/*"))
    assert parts[-2:] == [f"step-00000006.{part}-of-2.safetensors" for part in (1, 2)]
    train(fewer)
    ours, theirs = load_file(fewer.heads_path), load_file(whole.heads_path)
    assert all(torch.allclose(ours[name], tensor, rtol=1e-3, atol=1e-4) for name, tensor in theirs.items())
