"""What `plan` says that a step on a GPU takes is within 10 % of every byte that it allocates, at real sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.config import MedusaConfig, TrainConfig
from pipeline.execution.device_memory import Memory
from pipeline.heads.accuracy import label_ranks
from pipeline.heads.shape import head_kind
from pipeline.heads.soft_labels import TargetHead
from pipeline.targets.sizes import TargetSizes
from pipeline.training.feature_batches import BATCHES_AHEAD, Batch
from pipeline.training.heads_only import HeadsLearner
from pipeline.training.memory import HeadsSizes, StepSizes, held_out_rows
from pipeline.training.recipe import heads_recipe
from pipeline.training.sharded_heads import shard_heads
from pipeline.training.task import Workers
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
    integers = (tokens_N, tokens_N.expand(K, -1).contiguous(), rows_KN)
    next_N, labels_KN, teacher_KN = (tensor.to(device) for tensor in integers)
    return Batch(states[0], next_N, labels_KN, states[1], teacher_KN)


class OneOfMany(Workers):
    """Whose parts are all that it is given: shapes are those of many workers."""

    def gather(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return tensor.new_empty(self.world_size, *tensor.shape, dtype=dtype or tensor.dtype)

    def sum_to(self, rank: int, tensor: torch.Tensor) -> Any:
        return SimpleNamespace(wait=lambda: None)


def step_of(settings: TrainConfig, shape: str, workers: int, split: bool) -> tuple[float, Memory]:
    """The most bytes that one of so many workers holds in its second step, when the optimizer has its moments, and what
    is planned."""
    hidden_size, vocab_size = SHAPES[shape]
    learner = learner_of(settings, hidden_size, vocab_size)
    if split:
        learner.sharded = shard_heads(learner.heads, OneOfMany(0, workers))
    trainer, batch = Trainer(learner), batch_of(hidden_size, learner.recipe.batch_tokens // workers)
    for weight in trainer.parameters:
        weight.grad = torch.empty_like(weight)
    trainer.optimizer.step()
    moments = [leaf for state in trainer.optimizer.state.values() for leaf in state.values()]
    held = [*trainer.modules.parameters(), *moments, *(weight.grad for weight in trainer.parameters)]
    ledger = Ledger([*held, *batch.tensors().values(), learner.target_head.weight_VD])
    del held, moments, weight
    with ledger:
        trainer.step(2, [batch])
    ahead = BATCHES_AHEAD * sum(tensor.nbytes for tensor in batch.tensors().values())
    sizes = TargetSizes(*[0] * 4, hidden_size, vocab_size, *[0] * 7, itemsize=2)
    of_heads = HeadsSizes.of(type(learner.heads), learner.heads.shape)
    step = StepSizes(settings, of_heads, sizes, learner.recipe, workers, on_gpu=True, split=split)
    return ledger.peak["cuda:0"] + ahead, HeadsLearner.memory(step)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_at_real_sizes_takes_what_is_planned(on_fake_cuda, shape, kind):
    """Of one of sixteen workers, in bf16."""
    settings = TrainConfig(num_heads=K, precision="bf16", **KINDS[kind])
    found, planned = step_of(settings, shape, WORKERS, split=False)
    assert planned.total == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("kind", ["untied", "shared", "recurrent"])
def test_a_step_of_split_heads_of_a_70b_target_takes_what_is_planned(on_fake_cuda, kind, workers):
    settings = TrainConfig(num_heads=K, precision="bf16", **KINDS[kind])
    found, planned = step_of(settings, "70B", workers, split=True)
    assert planned.total == pytest.approx(found, rel=0.1)


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
