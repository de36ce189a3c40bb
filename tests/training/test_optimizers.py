from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup

from pipeline.config import TrainConfig
from pipeline.training.checkpoints import optimizer_state
from pipeline.training.optimizers import (
    cosine_with_warmup,
    heads_weight,
    make_optimizer,
    set_lr,
    trainable_parameters,
)

both_optimizers = pytest.mark.parametrize("name", ["adamw", "adamw-8bit"])


class Stacks(nn.Module):
    """Parameters in the shapes of stacked heads; large enough for 8-bit moments."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.block_weight = nn.Parameter(torch.randn(2, 3, 80, 80, generator=random))
        self.block_bias = nn.Parameter(torch.randn(2, 3, 80, generator=random))
        self.norm = nn.Parameter(torch.randn(80, generator=random))
        self.lm_head = nn.Parameter(torch.randn(3, 90, 80, generator=random))
        self.frozen = nn.Parameter(torch.randn(3, 3, 3, generator=random), requires_grad=False)


def test_eight_bit_moments_follow_adamw_in_a_quarter_memory():
    exact, small = Stacks(), Stacks()
    start = exact.lm_head.detach().clone()
    sizes = []
    for module, name in ((exact, "adamw"), (small, "adamw-8bit")):
        train = TrainConfig(optimizer=name)
        optimizer = make_optimizer({"heads": module}, {"heads": 1e-2}, train)
        random = torch.Generator().manual_seed(0)
        for _ in range(10):
            for parameter in trainable_parameters(module).values():
                parameter.grad = torch.randn(parameter.shape, generator=random)
            optimizer.step()
        sizes.append(sum(tensor.nbytes for tensor in optimizer_state(optimizer)[0].values()))
    assert (exact.lm_head - small.lm_head).norm() < 0.1 * (exact.lm_head - start).norm()
    assert sizes[1] < 0.3 * sizes[0]


@both_optimizers
def test_heads_and_backbone_have_their_rates(name):
    """AdamW's first step is one learning rate along the gradient's sign."""
    heads, backbone = Stacks(), nn.Linear(64, 80)
    train = TrainConfig(optimizer=name)
    modules, rates = {"heads": heads, "backbone": backbone}, {"heads": 1e-2, "backbone": 1e-3}
    optimizer = make_optimizer(modules, rates, train)
    parameters = (heads.block_weight, heads.block_bias, heads.norm, *backbone.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    frozen = heads.frozen.clone()
    set_lr(optimizer, 0.5)
    for parameter in [*heads.parameters(), *backbone.parameters()]:
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    lrs = [5e-3, 5e-3, 5e-3, 5e-4, 5e-4]
    for start, end, lr in zip(before, parameters, lrs, strict=True):
        torch.testing.assert_close(end, start - lr, rtol=1e-4, atol=1e-6)
    assert torch.equal(heads.frozen, frozen)


@pytest.mark.parametrize("warmup", [10, 0])
def test_cosine_with_warmup_is_that_of_transformers(warmup):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, warmup, 50)
    for step in range(51):
        assert cosine_with_warmup(step, 50, warmup) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [("sine", [0, 1 / 2, 3**0.5 / 2, 1]), ("linear", [0, 1 / 3, 2 / 3, 1]), ("constant", [1] * 4)],
)
def test_the_heads_weight_follows_its_schedule(schedule, shares):
    """A quarter sine has half its height at T/3, and half the root of 3 at 2T/3."""
    found = [heads_weight(step, 300, 0.01, schedule) for step in (0, 100, 200, 300)]
    assert found == pytest.approx([0.01 * share for share in shares])
