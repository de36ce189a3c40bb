"""The memory that `plan` states for a training step on a GPU is near every byte that it allocates,
at real sizes.
"""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from pipeline.run.estimate import TOLERANCE, memory_of_stages, planned, target_sizes
from pipeline.training.feature_batches import BATCHES_AHEAD
from pipeline.training.recipe import Recipe, make_recipe
from pipeline.training.trainer import Trainer
from tests.fake_cuda.learners import backbone_learner, feature_batch, heads_learner, text_batch
from tests.fake_cuda.ledger import Ledger
from tests.flows.tiny import resolved

SIZES = {"7B": (4096, 32000), "8B": (4096, 128256), "70B": (8192, 128256)}  # hidden, vocabulary
KINDS = {
    "untied": {"train__heads": "medusa"},
    "shared": {"train__heads": "medusa", "train__medusa": {"lm_head": "shared"}},
    "recurrent": {"train__heads": "recurrent"},
}
LENGTH = 2048
TUNING = {
    "train__method": "medusa-2",
    "train__backbone": {
        "sequence_length": LENGTH,
        "batch_sequences": 1,
        "micro_batch": 1,
        "gradient_checkpointing": False,
        "recipe": "joint",
    },
}


@pytest.fixture
def plan_of(make_config, tmp_path):
    """`plan_of("7B", **settings)`: a configuration whose target is a config.json of one layer."""

    def make(size, **settings):
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
        return make_config(
            tmp_path,
            target__model=str(tmp_path / size),
            target__dtype="bfloat16",
            placement__gpu_memory_gb=80,
            train__num_heads=5,
            train__batch_tokens="auto",
            train__precision="bf16",
            train__soft_labels=0.5,
            **settings,
        )

    return make


def estimated(config):
    """Bytes of the training stage."""
    run = planned(resolved(config))
    stages = {memory.stage: memory for memory in memory_of_stages(run, target_sizes(run))}
    return stages["train"].total


def peak_of_second_step(learner, batches, held=()):
    """The most bytes that are held when the optimizer has its moments."""
    trainer = Trainer(learner)
    for weight in trainer.parameters:
        weight.grad = torch.empty_like(weight)
    trainer.optimizer.step()
    held = [*held, *trainer.modules.parameters()]
    held += [weight.grad for weight in trainer.parameters]
    for state in trainer.optimizer.state.values():
        held += state.values()
    with Ledger(held) as ledger:
        trainer.step(2, batches)
    return ledger.peak["cuda:0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size"),
    [("untied", "70B"), ("shared", "8B"), ("recurrent", "7B"), ("recurrent", "70B")],
)
def test_a_step_of_heads_takes_about_the_estimate(plan_of, on_fake_cuda, kind, size):
    config = plan_of(size, **KINDS[kind])
    recipe = make_recipe(config.train, 10**8, SIZES[size][0])
    learner = heads_learner(config.train, *SIZES[size], recipe)
    batch = feature_batch(SIZES[size][0], recipe.batch_tokens, 5)
    tensors = batch.tensors()
    peak = peak_of_second_step(learner, [batch], [*tensors, learner.target_head.weight_VD])
    peak += BATCHES_AHEAD * sum(tensor.nbytes for tensor in tensors)
    assert estimated(config) == pytest.approx(peak, rel=TOLERANCE)


@pytest.mark.slow
def test_a_step_of_heads_and_backbone_takes_about_the_estimate(plan_of, on_fake_cuda):
    """Two micro-batches, of one of the target's layers: every further layer adds the same."""
    config = plan_of("7B", **KINDS["untied"], **TUNING)
    recipe = Recipe(1, 1e-3, 0, 1, LENGTH, batch_sequences=1)
    target = LlamaConfig.from_pretrained(config.target.model)
    batch = text_batch(LENGTH, 5)
    peak = peak_of_second_step(backbone_learner(config.train, target, recipe), [batch, batch])
    assert estimated(config) == pytest.approx(peak, rel=TOLERANCE)
