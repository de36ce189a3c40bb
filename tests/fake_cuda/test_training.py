"""Training steps on a fake CUDA device: where gradients are, and how often the host waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.config import BackboneConfig, MedusaConfig, TrainConfig
from pipeline.conversations.spans import Span
from pipeline.heads.kinds import head_kind
from pipeline.heads.losses import TargetHead
from pipeline.targets.lora import add_lora
from pipeline.training.adapted_backbone import Backbone
from pipeline.training.feature_batches import Batch
from pipeline.training.heads_and_backbone import BackboneLearner, MicroBatch
from pipeline.training.heads_only import HeadsLearner
from pipeline.training.recipe import Recipe
from pipeline.training.task import Learner, Workers
from pipeline.training.text_batches import Text, assemble_texts
from pipeline.training.trainer import Trainer

K = 5
CUDA = torch.device("cuda", 0)
KINDS: dict[str, dict[str, Any]] = {
    "untied": {"heads": "medusa"},
    "shared": {"heads": "medusa", "medusa": MedusaConfig(lm_head="shared")},
    "tied": {"heads": "medusa", "medusa": MedusaConfig(lm_head="tied")},
    "recurrent": {"heads": "recurrent"},
}


def learner_of(
    cls: type[Learner], settings: TrainConfig, size: int, vocab: int, recipe: Recipe
) -> Any:
    """A learner on the device, without files."""
    learner, kind = cls.__new__(cls), head_kind(settings.heads)
    learner.spec, learner.workers, learner.device = (
        SimpleNamespace(settings=settings),
        Workers(),
        CUDA,
    )
    learner.heads, learner.recipe = kind(kind.shape_of(settings, size, vocab), device=CUDA), recipe
    learner.modules, learner.peak_lrs = {"heads": learner.heads}, {"heads": 1e-3, "backbone": 1e-3}
    return learner


def cached(settings: TrainConfig, size: int, vocab: int, num_positions: int) -> tuple[Any, Batch]:
    """A learner of heads alone, and its batch."""
    recipe = Recipe(1, 1e-3, 0, 1, batch_tokens=num_positions)
    learner = learner_of(HeadsLearner, settings, size, vocab, recipe)
    learner.target_head = TargetHead(torch.empty(vocab, size, dtype=torch.bfloat16, device=CUDA))
    hidden_ND = torch.empty(num_positions, size, dtype=torch.bfloat16, device=CUDA)
    labels_KN = torch.randint(vocab, (K, num_positions), device=CUDA)
    rows_KN = torch.randint(num_positions, (K, num_positions), device=CUDA)
    return learner, Batch(hidden_ND, labels_KN[0], labels_KN, torch.empty_like(hidden_ND), rows_KN)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_heads_waits_as_often_for_many_positions_as_for_few(kind, on_fake_cuda):
    waits = []
    for num_positions in (64, 2048):  # chunks of logits: 1 and 5 or so
        learner, batch = cached(
            TrainConfig(num_heads=K, soft_labels=0.5, **KINDS[kind]), 64, 128_256, num_positions
        )
        trainer = Trainer(learner)
        on_fake_cuda.waits.clear(), on_fake_cuda.transfers.clear()
        trainer.step(1, [batch])
        waits.append(list(on_fake_cuda.waits))
        assert {weight.grad.device for weight in trainer.parameters} == {CUDA}
        assert not on_fake_cuda.downloads
    assert waits[0] == waits[1] and len(waits[1]) < 10


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_a_step_of_heads_and_backbone(loss, on_fake_cuda):
    """Two packed sequences that accumulate: gradients on the device, and no number read in
    between.
    """
    size, vocab, length = 64, 4096, 96
    tuned = BackboneConfig(
        sequence_length=length, loss=loss, gradient_checkpointing=False, lora_rank=4
    )
    settings = TrainConfig(
        method="medusa-2", heads="medusa", num_heads=K, soft_labels=0.5, backbone=tuned
    )
    learner = learner_of(
        BackboneLearner, settings, size, vocab, Recipe(1, 1e-3, 0, 1, 2 * length, batch_sequences=2)
    )
    learner.settings, learner.dtype = tuned, torch.bfloat16
    sizes = {
        "hidden_size": size,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": vocab,
    }
    with CUDA:
        target = LlamaForCausalLM(
            LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
        ).to(torch.bfloat16)
        learner.backbone = Backbone.__new__(Backbone)
        nn.Module.__init__(learner.backbone)
        learner.backbone.tuned = add_lora(target, rank=4, alpha=8, dropout=0.1)
    learner.modules["backbone"] = learner.backbone
    learner.heads_weight = lambda step: 0.01
    tokens = np.random.default_rng(0).integers(vocab, size=length + 1, dtype=np.int32)
    text = Text(tokens, (Span(1, length + 1, "assistant"),), length)
    trainer = Trainer(learner)
    on_fake_cuda.waits.clear(), on_fake_cuda.downloads.clear()
    trainer.step(1, [MicroBatch(assemble_texts([[text]], K), seed) for seed in (1, 2)])
    assert {weight.grad.device for weight in trainer.parameters} == {CUDA}
    assert len(on_fake_cuda.waits) < 20 and not on_fake_cuda.downloads
