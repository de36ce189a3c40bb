"""What `plan` says that a training step takes is what one takes: every storage is counted while real steps run."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.config import BackboneConfig, MedusaConfig, TrainConfig
from pipeline.conversations.spans import Span
from pipeline.heads import losses
from pipeline.heads.shape import head_kind
from pipeline.heads.soft_labels import TargetHead
from pipeline.targets.sizes import target_sizes
from pipeline.targets.spec import TargetSpec
from pipeline.training.adapted_backbone import Backbone
from pipeline.training.feature_batches import BATCHES_AHEAD, Batch
from pipeline.training.heads_and_backbone import BackboneLearner, MicroBatch
from pipeline.training.heads_only import HeadsLearner
from pipeline.training.memory import HeadsSizes, StepSizes
from pipeline.training.recipe import Recipe
from pipeline.training.task import Workers
from pipeline.training.text_batches import Text, assemble_texts
from pipeline.training.trainer import Trainer
from tests.fake_cuda.ledger import Ledger

V, D, K, N = 2048, 128, 3, 384
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_logits_at_a_time(monkeypatch):
    monkeypatch.setitem(losses.CHUNK_BYTES, "cpu", 1 << 20)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> TargetSpec:
    """As a 7B target is to its batch, in small: bf16, wide layers, several of them."""
    directory = tmp_path_factory.mktemp("target")
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": 3 * D, "num_hidden_layers": 6}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, dtype="bfloat16"))
    model.to(torch.bfloat16).save_pretrained(directory)
    return TargetSpec(str(directory), dtype="bfloat16")


def learner_of(cls, settings: TrainConfig, target: TargetSpec, recipe: Recipe):
    """A learner without files: its heads start from noise."""
    learner, kind = cls.__new__(cls), head_kind(settings.heads)
    learner.spec, learner.workers, learner.device = SimpleNamespace(settings=settings, target=target), Workers(), CPU
    learner.heads, learner.recipe = kind(kind.shape_of(settings, D, V)), recipe
    for weight in learner.heads.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    learner.modules, learner.peak_lrs = {"heads": learner.heads}, {"heads": 1e-3, "backbone": 1e-3}
    return learner


def peak_of(learner, batches) -> float:
    """The most bytes that live in a second step, when the optimizer has its moments."""
    trainer = Trainer(learner)
    trainer.step(1, batches)
    moments = [leaf for state in trainer.optimizer.state.values() for leaf in state.values() if leaf.numel() > 1]
    held = [*trainer.modules.parameters(), *moments, *(weight.grad for weight in trainer.parameters)]
    if teacher := getattr(learner, "target_head", None):
        held.append(teacher.weight_VD)
    if isinstance(batches[0], Batch):
        held += batches[0].tensors().values()
    ledger = Ledger(held)
    del held, moments
    with ledger:
        trainer.step(2, batches)
    return ledger.peak["cpu"]


def expected(learner, target: TargetSpec) -> float:
    settings, sizes = learner.spec.settings, HeadsSizes.of(type(learner.heads), learner.heads.shape)
    return type(learner).memory(StepSizes(settings, sizes, target_sizes(target), learner.recipe, 1, False)).total


@pytest.mark.parametrize(("precision", "soft_labels"), [("bf16", 0.5), ("fp32", 0.0)])
@pytest.mark.parametrize(
    "kind",
    [
        {"heads": "medusa", "medusa": MedusaConfig(lm_head="untied")},
        pytest.param({"heads": "medusa", "medusa": MedusaConfig(lm_head="tied", num_layers=2)}, marks=pytest.mark.slow),
        pytest.param({"heads": "medusa", "medusa": MedusaConfig(lm_head="shared")}, marks=pytest.mark.slow),
        {"heads": "recurrent"},
    ],
)
def test_a_step_from_the_cache_takes_what_is_planned_for_it(target, kind, precision, soft_labels):
    settings = TrainConfig(num_heads=K, precision=precision, soft_labels=soft_labels, **kind)
    learner = learner_of(HeadsLearner, settings, target, Recipe(1, 1e-3, 0, 1, batch_tokens=N))
    dtype = torch.bfloat16
    head = TargetHead(torch.randn(V, D, dtype=dtype if precision == "bf16" else torch.float32))
    learner.target_head = head if soft_labels else None
    labels_KN, rows_KN = torch.randint(V, (K, N)), torch.randint(N, (K, N))
    hidden_ND = torch.randn(N, D, dtype=dtype)
    teacher = (hidden_ND.clone(), rows_KN) if soft_labels else ()
    batch = Batch(hidden_ND, torch.randint(V, (N,)), labels_KN, *teacher)
    one = sum(tensor.nbytes for tensor in batch.tensors().values())
    found = peak_of(learner, [batch]) + BATCHES_AHEAD * one
    assert expected(learner, target) == pytest.approx(found, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("checkpointing", "num_sequences"), [(True, 2), (False, 1)])
def test_a_step_of_the_backbone_takes_what_is_planned_for_it(target, checkpointing, num_sequences):
    """On a text that is cut at the sequence's length, so that no state teaches its last labels."""
    tuned = BackboneConfig(sequence_length=N, gradient_checkpointing=checkpointing, batch_sequences=num_sequences)
    settings = TrainConfig(
        method="medusa-2", heads="medusa", num_heads=K, precision="bf16", soft_labels=0.5, backbone=tuned
    )
    learner = learner_of(BackboneLearner, settings, target, Recipe(1, 1e-3, 0, 1, N, batch_sequences=num_sequences))
    learner.settings, learner.dtype = tuned, torch.bfloat16
    learner.backbone = Backbone(target, tuned, CPU, torch.bfloat16)
    learner.modules["backbone"] = learner.backbone
    sizes = HeadsSizes.of(type(learner.heads), learner.heads.shape)
    tokens = np.random.default_rng(0).integers(V, size=N + 10, dtype=np.int32)
    text = Text(tokens, (Span(1, N + 10, "assistant"),), N)
    batches = [MicroBatch(assemble_texts([[text]], K), seed) for seed in range(num_sequences)]
    assert (batches[0].texts.teacher_KN < 0).any() and (batches[0].texts.labels_KN[:, -1] >= 0).any()
    learner._heads_weight = lambda step: 0.01
    step = StepSizes(settings, sizes, target_sizes(target), learner.recipe, 1, False)
    assert BackboneLearner.memory(step).total == pytest.approx(peak_of(learner, batches), rel=0.1)
