"""What `plan` says that a training step on a GPU takes is near every byte that it allocates, at
real sizes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.config import Config, TrainConfig
from pipeline.conversations.spans import Span
from pipeline.heads.kinds import head_kind
from pipeline.heads.losses import TargetHead
from pipeline.run.estimate import (
    TOLERANCE,
    StageMemory,
    memory_of_stages,
    planned,
    target_sizes,
)
from pipeline.targets.lora import add_lora
from pipeline.training.adapted_backbone import Backbone
from pipeline.training.feature_batches import BATCHES_AHEAD, Batch
from pipeline.training.heads_and_backbone import BackboneLearner, MicroBatch
from pipeline.training.heads_only import HeadsLearner
from pipeline.training.recipe import Recipe, make_recipe
from pipeline.training.task import Workers
from pipeline.training.text_batches import Text, assemble_texts
from pipeline.training.trainer import Trainer
from tests.fake_cuda.ledger import Ledger
from tests.flows.tiny import resolved

SIZES = {
    "7B": (4096, 32000),
    "8B": (4096, 128256),
    "70B": (8192, 128256),
}  # hidden size, vocabulary
KINDS: dict[str, dict[str, Any]] = {
    "untied": {"train__heads": "medusa"},
    "shared": {"train__heads": "medusa", "train__medusa": {"lm_head": "shared"}},
    "recurrent": {"train__heads": "recurrent"},
}
WITHIN = TOLERANCE
GPU = torch.device("cuda", 0)


@pytest.fixture
def plan_of(make_config, tmp_path):
    """`plan_of("7B", **settings)`: a configuration whose target is a config.json of one layer."""

    def make(size: str, **settings: Any) -> Config:
        hidden_size, vocab_size = SIZES[size]
        target = LlamaConfig(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            intermediate_size=hidden_size * 7 // 2,
            num_attention_heads=hidden_size // 128,
            num_key_value_heads=8,
            num_hidden_layers=1,
            dtype="bfloat16",
            architectures=["LlamaForCausalLM"],
        )
        target.save_pretrained(tmp_path / size)
        usual = {
            "target__model": str(tmp_path / size),
            "target__dtype": "bfloat16",
            "placement__gpu_memory_gb": 80,
        }
        of_training = {
            "train__num_heads": 5,
            "train__batch_tokens": "auto",
            "train__precision": "bf16",
            "train__soft_labels": 0.5,
        }
        return make_config(tmp_path, **usual | of_training | settings)

    return make


def estimate_of(config: Config) -> StageMemory:
    run = planned(resolved(config))
    sizes = target_sizes(run)
    assert sizes is not None
    return next(each for each in memory_of_stages(run, sizes) if each.stage == "train")


def learner_of(settings: TrainConfig, hidden_size: int, vocab_size: int) -> HeadsLearner:
    """A learner without files, on a GPU, with soft labels."""
    learner, kind = HeadsLearner.__new__(HeadsLearner), head_kind(settings.heads)
    learner.spec, learner.workers, learner.device = (
        SimpleNamespace(settings=settings),
        Workers(),
        GPU,
    )
    learner.heads = kind(kind.shape_of(settings, hidden_size, vocab_size), device=GPU)
    learner.recipe = make_recipe(settings, 10**8, hidden_size)
    learner.modules, learner.peak_lrs = {"heads": learner.heads}, {"heads": 1e-3}
    learner.target_head = TargetHead(
        torch.empty(vocab_size, hidden_size, dtype=torch.bfloat16, device=GPU)
    )
    return learner


def batch_of(hidden_size: int, num_positions: int, num_heads: int) -> Batch:
    states = [
        torch.empty(num_positions, hidden_size, dtype=torch.bfloat16, device=GPU) for _ in range(2)
    ]
    tokens_N = torch.arange(num_positions).remainder(1000)
    rows_KN = torch.arange(num_positions).expand(num_heads, -1).contiguous()
    rows_KN[:, -1] = -1  # a text that is cut off there
    integers = (tokens_N, tokens_N.expand(num_heads, -1).contiguous(), rows_KN)
    next_N, labels_KN, teacher_KN = (tensor.to(GPU) for tensor in integers)
    return Batch(states[0], next_N, labels_KN, states[1], teacher_KN)


def held_after_a_step(trainer: Trainer) -> list[torch.Tensor]:
    """Weights, gradients and the optimizer's moments."""
    for weight in trainer.parameters:
        weight.grad = torch.empty_like(weight)
    trainer.optimizer.step()
    moments = [leaf for state in trainer.optimizer.state.values() for leaf in state.values()]
    return [
        *trainer.modules.parameters(),
        *moments,
        *(weight.grad for weight in trainer.parameters),
    ]


def bytes_of_a_step(config: Config, hidden_size: int, vocab_size: int) -> float:
    """The most bytes that a worker holds in its second step, when the optimizer has its moments."""
    learner = learner_of(config.train, hidden_size, vocab_size)
    batch = batch_of(hidden_size, learner.recipe.batch_tokens, config.train.num_heads)
    trainer = Trainer(learner)
    ledger = Ledger([*held_after_a_step(trainer), *batch.tensors(), learner.target_head.weight_VD])
    with ledger:
        trainer.step(2, [batch])
    ahead = BATCHES_AHEAD * sum(tensor.nbytes for tensor in batch.tensors().values())
    return ledger.peak["cuda:0"] + ahead


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size"),
    [("untied", "70B"), ("shared", "8B"), ("recurrent", "7B"), ("recurrent", "70B")],
)
def test_a_step_takes_about_what_is_planned(plan_of, on_fake_cuda, kind, size):
    config = plan_of(size, **KINDS[kind])
    found = bytes_of_a_step(config, *SIZES[size])
    assert estimate_of(config).total == pytest.approx(found, rel=WITHIN)


@pytest.mark.slow
def test_a_step_of_heads_and_backbone_takes_about_what_is_planned(plan_of, on_fake_cuda):
    """Two micro-batches, of one of the target's layers: what every further layer would add is the
    same.
    """
    tuned = {
        "sequence_length": 2048,
        "batch_sequences": 1,
        "micro_batch": 1,
        "gradient_checkpointing": False,
    }
    config = plan_of(
        "7B",
        **KINDS["untied"],
        train__method="medusa-2",
        train__backbone={**tuned, "recipe": "joint"},
    )
    learner = tuning_learner_of(config.train, LlamaConfig.from_pretrained(config.target.model))
    text = Text(np.arange(2049, dtype=np.int32), (Span(1, 2049, "assistant"),), 2048)
    trainer, batch = (
        Trainer(learner),
        MicroBatch(assemble_texts([[text]], config.train.num_heads), 0),
    )
    ledger = Ledger(held_after_a_step(trainer))
    with ledger:
        trainer.step(2, [batch, batch])
    assert estimate_of(config).total == pytest.approx(ledger.peak["cuda:0"], rel=WITHIN)


def tuning_learner_of(settings: TrainConfig, target: LlamaConfig) -> BackboneLearner:
    """A learner of heads and backbone without files, on a GPU, of one packed sequence a step."""
    learner, tuned = BackboneLearner.__new__(BackboneLearner), settings.backbone
    learner.spec, learner.workers, learner.device = (
        SimpleNamespace(settings=settings),
        Workers(),
        GPU,
    )
    kind = head_kind(settings.heads)
    learner.heads = kind(kind.shape_of(settings, target.hidden_size, target.vocab_size), device=GPU)
    learner.recipe = Recipe(1, 1e-3, 0, 1, tuned.sequence_length, batch_sequences=1)
    learner.settings, learner.dtype, learner.heads_weight = (
        tuned,
        torch.bfloat16,
        lambda step: 0.01,
    )
    learner.backbone = Backbone.__new__(Backbone)
    torch.nn.Module.__init__(learner.backbone)
    with GPU:
        model = LlamaForCausalLM(target).to(torch.bfloat16)
        adapter = {
            "rank": tuned.lora_rank,
            "alpha": tuned.lora_alpha,
            "dropout": tuned.lora_dropout,
        }
        learner.backbone.tuned = add_lora(model, **adapter)
    learner.modules = {"heads": learner.heads, "backbone": learner.backbone}
    learner.peak_lrs = {"heads": 1e-3, "backbone": 1e-3}
    return learner
