"""Training steps on a fake CUDA device: where gradients are, and how often the host waits."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from pipeline.config import BackboneConfig, MedusaConfig, TrainConfig
from pipeline.training.recipe import Recipe
from pipeline.training.trainer import Trainer
from tests.fake_cuda.learners import (
    CUDA,
    backbone_learner,
    feature_batch,
    heads_learner,
    text_batch,
)
from tests.tiny_models import SIZES

K = 5
KINDS = {
    "untied": {"heads": "medusa"},
    "shared": {"heads": "medusa", "medusa": MedusaConfig(lm_head="shared")},
    "tied": {"heads": "medusa", "medusa": MedusaConfig(lm_head="tied")},
    "recurrent": {"heads": "recurrent"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_waits_of_a_step_do_not_grow_with_positions(kind, on_fake_cuda):
    settings = TrainConfig(num_heads=K, soft_labels=0.5, **KINDS[kind])
    waits = []
    for num_positions in (64, 2048):  # chunks of logits: 1 and 5 or so
        recipe = Recipe(1, 1e-3, 0, 1, batch_tokens=num_positions)
        trainer = Trainer(heads_learner(settings, 64, 128_256, recipe))
        batch = feature_batch(64, num_positions, K)
        on_fake_cuda.clear()
        trainer.step(1, [batch])
        waits.append(list(on_fake_cuda.waits))
        assert {weight.grad.device for weight in trainer.parameters} == {CUDA}
        assert not on_fake_cuda.downloads
    assert waits[0] == waits[1] and len(waits[1]) < 10


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_accumulation_of_heads_and_backbone_reads_no_number(loss, on_fake_cuda):
    size = {"sequence_length": 96, "gradient_checkpointing": False, "lora_rank": 4}
    tuned = BackboneConfig(loss=loss, **size)
    given = {"method": "medusa-2", "heads": "medusa", "num_heads": K, "soft_labels": 0.5}
    settings = TrainConfig(**given, backbone=tuned)
    target = LlamaConfig(**SIZES | {"vocab_size": 4096, "hidden_size": 64})
    recipe = Recipe(1, 1e-3, 0, 1, 192, batch_sequences=2)
    trainer = Trainer(backbone_learner(settings, target, recipe))
    batches = [text_batch(96, K, seed) for seed in (1, 2)]
    on_fake_cuda.clear()
    trainer.step(1, batches)
    assert {weight.grad.device for weight in trainer.parameters} == {CUDA}
    assert len(on_fake_cuda.waits) < 20 and not on_fake_cuda.downloads
