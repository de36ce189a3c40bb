from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup

from pipeline.config import TrainConfig
from pipeline.training.optimizers import (
    cosine_with_warmup,
    heads_weight,
    load_optimizer,
    make_optimizer,
    optimizer_tensors,
    set_lr,
)


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


def step(module: Stacks, optimizer: torch.optim.Optimizer, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    optimizer.zero_grad(set_to_none=True)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=random)
    optimizer.step()


def optimizer_of(module: nn.Module, settings: TrainConfig) -> torch.optim.Optimizer:
    return make_optimizer({"heads": module}, {"heads": settings.lr}, settings)


def settings(name: str, **more: float | None) -> TrainConfig:
    return TrainConfig(optimizer=name, lr=1e-2, **more)


@pytest.mark.parametrize("name", ["adamw", "adamw-8bit"])
def test_a_restored_optimizer_takes_the_same_steps(name):
    whole, broken = Stacks(), Stacks()
    optimizer, before = optimizer_of(whole, settings(name)), optimizer_of(broken, settings(name))
    for seed in range(3):
        step(whole, optimizer, seed)
        step(broken, before, seed)
    tensors, numbers = optimizer_tensors(before)
    after = optimizer_of(broken, settings(name))
    load_optimizer(after, {key: value.clone() for key, value in tensors.items()}, numbers)
    for seed in range(3, 6):
        step(whole, optimizer, seed)
        step(broken, after, seed)
    for ours, theirs in zip(whole.parameters(), broken.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_eight_bit_moments_follow_adamw_closely_in_a_quarter_of_the_memory():
    exact, small = Stacks(), Stacks()
    start = exact.lm_head.detach().clone()
    optimizers = [
        optimizer_of(exact, settings("adamw")),
        optimizer_of(small, settings("adamw-8bit")),
    ]
    for seed in range(10):
        step(exact, optimizers[0], seed)
        step(small, optimizers[1], seed)
    moved = (exact.lm_head - start).norm()
    assert (exact.lm_head - small.lm_head).norm() < 0.1 * moved
    sizes = [
        sum(t.nbytes for t in optimizer_tensors(optimizer)[0].values()) for optimizer in optimizers
    ]
    assert sizes[1] < 0.3 * sizes[0]


@pytest.mark.parametrize("name", ["adamw", "adamw-8bit"])
def test_weights_decay_and_biases_norms_and_frozen_parameters_do_not(name):
    module = Stacks()
    before = {key: value.detach().clone() for key, value in module.named_parameters()}
    optimizer = optimizer_of(module, settings(name, weight_decay=0.5))
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(module.block_weight, before["block_weight"] * (1 - 1e-2 * 0.5))
    assert all(
        torch.equal(getattr(module, name), before[name])
        for name in ("block_bias", "norm", "frozen")
    )


@pytest.mark.parametrize("name", ["adamw", "adamw-8bit"])
def test_heads_learn_four_times_as_fast_as_the_backbone_unless_told_otherwise_biases_among_them(
    name,
):
    for given, expected in ((None, 2.5e-3), (1e-4, 1e-4)):
        heads, backbone = Stacks(), nn.Linear(64, 80)
        train = settings(name, backbone={"lr": given}, weight_decay=0.1)
        rates = {"heads": train.lr, "backbone": train.backbone.peak_lr(train.lr)}
        optimizer = make_optimizer({"heads": heads, "backbone": backbone}, rates, train)
        before = [
            each.detach().clone()
            for each in (heads.block_weight, heads.block_bias, *backbone.parameters())
        ]
        set_lr(optimizer, 0.5)
        for parameter in [*heads.parameters(), *backbone.parameters()]:
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        # AdamW's first step is one learning rate along the gradient's sign, and weights decay
        # besides.
        rates = [5e-3, 5e-3, expected / 2, expected / 2]
        after = (heads.block_weight, heads.block_bias, *backbone.parameters())
        for start, end, lr, decay in zip(before, after, rates, (0.1, 0, 0.1, 0), strict=True):
            torch.testing.assert_close(end, start * (1 - lr * decay) - lr, rtol=1e-4, atol=1e-6)


def test_dropping_gradients_frees_those_of_the_sliced_views_too():
    module = Stacks()
    optimizer = optimizer_of(module, settings("adamw-8bit"))
    step(module, optimizer, 0)
    optimizer.zero_grad(set_to_none=True)
    held = [p.grad for group in optimizer.param_groups for p in group["params"]] + [
        p.grad for p in module.parameters()
    ]
    assert all(gradient is None for gradient in held)


@pytest.mark.parametrize(("total", "warmup"), [(50, 10), (50, 0), (10, 10), (5, 20)])
def test_cosine_with_warmup_is_that_of_transformers(total: int, warmup: int):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, warmup, total)
    for step in range(total + 1):
        assert cosine_with_warmup(step, total, warmup) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


def test_rate_stays_at_zero_after_the_last_step():
    assert cosine_with_warmup(61, 50, 10) == pytest.approx(0.0, abs=1e-12)


def test_the_heads_weight_rises_along_a_quarter_sine_a_line_or_not_at_all():
    """At T/3 a quarter sine has half its height, at 2T/3 half the root of 3."""
    total, peak = 300, 0.01
    sine, linear, constant = (
        [heads_weight(step, total, peak, schedule) for step in (0, 100, 200, 300)]
        for schedule in ("sine", "linear", "constant")
    )
    assert sine == pytest.approx([0, peak / 2, peak * 3**0.5 / 2, peak])
    assert linear == pytest.approx([0, peak / 3, peak * 2 / 3, peak])
    assert constant == [peak] * 4
