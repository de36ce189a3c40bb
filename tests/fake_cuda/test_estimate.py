"""The memory that `plan` states for a training step on a GPU is near every byte that it allocates,
at real sizes.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from pipeline.heads.kinds import head_kind
from pipeline.heads.losses import TargetHead
from pipeline.run.estimate import TOLERANCE, memory_of_stages, on_planned_gpus, target_sizes
from pipeline.training.feature_batches import BATCHES_AHEAD, Batch
from pipeline.training.heads_only import HeadsLearner
from pipeline.training.recipe import make_recipe
from pipeline.training.task import Workers
from pipeline.training.trainer import Trainer
from tests.fake_cuda.ledger import Ledger
from tests.flows.tiny import resolved

CUDA = torch.device("cuda", 0)
K = 5


def heads_learner(settings, hidden_size, vocab_size, recipe):
    """A learner of heads alone, with soft labels, without files."""
    learner, kind = HeadsLearner.__new__(HeadsLearner), head_kind(settings.heads)
    learner.spec, learner.workers = SimpleNamespace(settings=settings), Workers()
    learner.device, learner.dtype, learner.recipe = CUDA, torch.bfloat16, recipe
    learner.heads = kind(kind.shape_of(settings, hidden_size, vocab_size), device=CUDA)
    learner.modules, learner.peak_lrs = {"heads": learner.heads}, {"heads": 1e-3}
    weight_VD = torch.empty(vocab_size, hidden_size, dtype=torch.bfloat16, device=CUDA)
    learner.target_head = TargetHead(weight_VD)
    return learner


def feature_batch(hidden_size, num_positions):
    """Positions of one text that is cut off at its end."""
    hidden_ND = torch.empty(num_positions, hidden_size, dtype=torch.bfloat16, device=CUDA)
    tokens_N = torch.arange(num_positions).remainder(1000)
    rows_KN = torch.arange(num_positions).expand(K, -1).contiguous()
    rows_KN[:, -1] = -1
    next_N, rows_KN = tokens_N.to(CUDA), rows_KN.to(CUDA)
    return Batch(hidden_ND, next_N, next_N.expand(K, -1), torch.empty_like(hidden_ND), rows_KN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "hidden_size", "vocab_size"), [("medusa", 4096, 32000), ("recurrent", 8192, 128256)]
)
def test_a_step_of_heads_takes_about_the_estimate(
    make_config, tmp_path, on_fake_cuda, kind, hidden_size, vocab_size
):
    """The second step, when the optimizer has its moments."""
    target = LlamaConfig(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_attention_heads=hidden_size // 128,
        num_hidden_layers=1,
        architectures=["LlamaForCausalLM"],
    )
    target.save_pretrained(tmp_path / "target")
    config = make_config(
        tmp_path,
        target__model=str(tmp_path / "target"),
        target__dtype="bfloat16",
        placement__gpu_memory_gb=80,
        train__heads=kind,
        train__num_heads=K,
        train__batch_tokens="auto",
        train__precision="bf16",
        train__soft_labels=0.5,
    )
    recipe = make_recipe(config.train, 10**8, hidden_size, head_kind(kind))
    learner = heads_learner(config.train, hidden_size, vocab_size, recipe)
    batch = feature_batch(hidden_size, recipe.batch_tokens)
    trainer = Trainer(learner)
    for weight in trainer.parameters:
        weight.grad = torch.empty_like(weight)
    trainer.optimizer.step()
    held = [*batch, learner.target_head.weight_VD, *trainer.modules.parameters()]
    held += [weight.grad for weight in trainer.parameters]
    for state in trainer.optimizer.state.values():
        held += state.values()
    with Ledger(held) as ledger:
        trainer.step(2, [batch])
    peak = ledger.peak["cuda:0"] + BATCHES_AHEAD * sum(each.nbytes for each in batch)
    run = on_planned_gpus(resolved(config))
    stages = {memory.stage: memory for memory in memory_of_stages(run, target_sizes(run))}
    assert stages["train"].total == pytest.approx(peak, rel=TOLERANCE)
