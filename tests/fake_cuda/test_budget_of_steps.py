"""What `plan` says that a step on a GPU takes is within 10 % of every byte that it allocates, at real sizes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.config import BackboneConfig, MedusaConfig, TrainConfig
from pipeline.conversations.spans import Span
from pipeline.execution.device_memory import Memory
from pipeline.heads.accuracy import label_ranks
from pipeline.heads.shape import head_kind
from pipeline.heads.soft_labels import TargetHead
from pipeline.targets.lora import add_lora
from pipeline.targets.sizes import TargetSizes, target_sizes
from pipeline.targets.spec import TargetSpec
from pipeline.training.adapted_backbone import Backbone
from pipeline.training.feature_batches import BATCHES_AHEAD, Batch
from pipeline.training.heads_and_backbone import BackboneLearner, MicroBatch
from pipeline.training.heads_only import HeadsLearner
from pipeline.training.memory import HeadsSizes, StepSizes, held_out_rows
from pipeline.training.recipe import Recipe, heads_recipe
from pipeline.training.task import Workers
from pipeline.training.text_batches import Text, assemble_texts
from pipeline.training.trainer import Trainer
from tests.fake_cuda.ledger import Ledger

SHAPES = {"7B": (4096, 32000), "8B": (4096, 128256), "70B": (8192, 128256)}
KINDS = {
    "untied": {"heads": "medusa", "medusa": MedusaConfig(lm_head="untied")},
    "tied": {"heads": "medusa", "medusa": MedusaConfig(lm_head="tied")},
    "shared": {"heads": "medusa", "medusa": MedusaConfig(lm_head="shared")},
    "recurrent": {"heads": "recurrent"},
}
K, WORKERS = 5, 16


def learner_of(settings: TrainConfig, hidden_size: int, vocab_size: int) -> HeadsLearner:
    """A learner without files, on a GPU, with soft labels."""
    learner, kind, device = HeadsLearner.__new__(HeadsLearner), head_kind(settings.heads), torch.device("cuda", 0)
    learner.spec, learner.workers, learner.device = SimpleNamespace(settings=settings), Workers(), device
    learner.heads = kind(kind.shape_of(settings, hidden_size, vocab_size), device=device)
    learner.recipe = heads_recipe(settings, 10**8, hidden_size)
    learner.modules, learner.peak_lrs = {"heads": learner.heads}, {"heads": 1e-3}
    learner.target_head = TargetHead(torch.empty(vocab_size, hidden_size, dtype=torch.bfloat16, device=device))
    return learner


def batch_of(hidden_size: int, num_positions: int) -> Batch:
    device = torch.device("cuda", 0)
    states = [torch.empty(num_positions, hidden_size, dtype=torch.bfloat16, device=device) for _ in range(2)]
    tokens_N = torch.arange(num_positions).remainder(1000)
    rows_KN = torch.arange(num_positions).expand(K, -1).contiguous()
    rows_KN[:, -1] = -1  # a text that is cut off there
    integers = (tokens_N, tokens_N.expand(K, -1).contiguous(), rows_KN)
    next_N, labels_KN, teacher_KN = (tensor.to(device) for tensor in integers)
    return Batch(states[0], next_N, labels_KN, states[1], teacher_KN)


def held_after_a_step(trainer: Trainer) -> list[torch.Tensor]:
    """Weights, gradients and the optimizer's moments."""
    for weight in trainer.parameters:
        weight.grad = torch.empty_like(weight)
    trainer.optimizer.step()
    moments = [leaf for state in trainer.optimizer.state.values() for leaf in state.values()]
    return [*trainer.modules.parameters(), *moments, *(weight.grad for weight in trainer.parameters)]


def step_of(settings: TrainConfig, shape: str, workers: int) -> tuple[float, Memory]:
    """The most bytes that one of so many workers holds in its second step, when the optimizer has its moments, and what
    is planned."""
    hidden_size, vocab_size = SHAPES[shape]
    learner = learner_of(settings, hidden_size, vocab_size)
    trainer, batch = Trainer(learner), batch_of(hidden_size, learner.recipe.batch_tokens // workers)
    ledger = Ledger([*held_after_a_step(trainer), *batch.tensors().values(), learner.target_head.weight_VD])
    with ledger:
        trainer.step(2, [batch])
    ahead = BATCHES_AHEAD * sum(tensor.nbytes for tensor in batch.tensors().values())
    sizes = TargetSizes(*[0] * 4, hidden_size, vocab_size, *[0] * 7, itemsize=2)
    of_heads = HeadsSizes.of(type(learner.heads), learner.heads.shape)
    step = StepSizes(settings, of_heads, sizes, learner.recipe, workers, on_gpu=True)
    return ledger.peak["cuda:0"] + ahead, HeadsLearner.memory(step)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_at_real_sizes_takes_what_is_planned(on_fake_cuda, shape, kind):
    """Of one of sixteen workers, in bf16."""
    settings = TrainConfig(num_heads=K, precision="bf16", **KINDS[kind])
    found, planned = step_of(settings, shape, WORKERS)
    assert planned.total == pytest.approx(found, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["untied", "recurrent"])
def test_calibration_on_a_held_out_conversation_takes_what_is_planned(on_fake_cuda, kind, shape):
    hidden_size, vocab_size = SHAPES[shape]
    settings, num_positions = TrainConfig(num_heads=K, **KINDS[kind]), 2048
    heads = head_kind(settings.heads)
    module = heads(heads.shape_of(settings, hidden_size, vocab_size), device=torch.device("cuda", 0))
    hidden_ND = torch.empty(num_positions, hidden_size, device="cuda")
    labels_KN = torch.zeros(module.shape.max_depth, num_positions, dtype=torch.int64, device="cuda")
    with Ledger([*module.parameters(), hidden_ND, labels_KN]) as ledger:
        label_ranks(module, hidden_ND, labels_KN[0], labels_KN, 10)
    planned = held_out_rows(HeadsSizes.of(heads, module.shape), module.shape.max_depth, num_positions)
    assert planned.total == pytest.approx(ledger.peak["cuda:0"], rel=0.1)


def tuning_learner_of(settings: TrainConfig, config: LlamaConfig) -> BackboneLearner:
    """A learner of heads and backbone without files, on a GPU, of one packed sequence a step."""
    learner, tuned, device = BackboneLearner.__new__(BackboneLearner), settings.backbone, torch.device("cuda", 0)
    learner.spec, learner.workers, learner.device = SimpleNamespace(settings=settings), Workers(), device
    kind = head_kind(settings.heads)
    learner.heads = kind(kind.shape_of(settings, config.hidden_size, config.vocab_size), device=device)
    learner.recipe = Recipe(1, 1e-3, 0, 1, tuned.sequence_length, batch_sequences=1)
    learner.settings, learner.dtype, learner._heads_weight = tuned, torch.bfloat16, lambda step: 0.01
    learner.backbone = Backbone.__new__(Backbone)
    torch.nn.Module.__init__(learner.backbone)
    with device:
        target = LlamaForCausalLM(config).to(torch.bfloat16)
        adapter = {"rank": tuned.lora_rank, "alpha": tuned.lora_alpha, "dropout": tuned.lora_dropout}
        learner.backbone.tuned = add_lora(target, **adapter)
    learner.modules = {"heads": learner.heads, "backbone": learner.backbone}
    learner.peak_lrs = {"heads": 1e-3, "backbone": 1e-3}
    return learner


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["7B", "70B"])
def test_a_step_of_heads_and_backbone_at_real_sizes_takes_what_is_planned(on_fake_cuda, tmp_path, shape):
    """Of one of the target's layers, without checkpointing: what every further one would add is the same."""
    (hidden_size, vocab_size), length = SHAPES[shape], 2048
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size, "intermediate_size": hidden_size * 7 // 2}
    heads = {"num_attention_heads": hidden_size // 128, "num_key_value_heads": 8, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, **heads, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    tuned = BackboneConfig(sequence_length=length, batch_sequences=1, micro_batch=1, gradient_checkpointing=False)
    settings = TrainConfig(method="medusa-2", heads="medusa", num_heads=K, precision="bf16", backbone=tuned)
    learner = tuning_learner_of(settings, config)
    text = Text(np.arange(length + 1, dtype=np.int32), (Span(1, length + 1, "assistant"),), length)
    trainer, batch = Trainer(learner), MicroBatch(assemble_texts([[text]], K), 0)
    ledger = Ledger(held_after_a_step(trainer))
    with ledger:
        trainer.step(2, [batch])
    of_heads = HeadsSizes.of(type(learner.heads), learner.heads.shape)
    of_target = target_sizes(TargetSpec(str(tmp_path), dtype="bfloat16"))
    planned = BackboneLearner.memory(StepSizes(settings, of_heads, of_target, learner.recipe, 1, on_gpu=True))
    assert planned.total == pytest.approx(ledger.peak["cuda:0"], rel=0.1)
