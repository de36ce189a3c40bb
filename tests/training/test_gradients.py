"""Gradients of two workers, this process and another: summed while backward runs, and clipped by one norm."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeline.training.gradients import GradientSum, clip_gradients
from pipeline.training.task import TrainSpec, Workers
from tests.training.two_workers import train_as_two

SIZES = (3, 5, 400, 7, 2)


class Chain(nn.Module):
    """Layers that are applied one after another; the second worker leaves one of them out."""

    def __init__(self, skipped: int | None):
        super().__init__()
        self.skipped, self.unused = skipped, nn.Parameter(torch.ones(20))
        self.weights = nn.ParameterList([torch.full((size,), 0.5) for size in SIZES])

    def forward(self, factor: float) -> torch.Tensor:
        total = torch.tensor(factor)
        for number, weight in enumerate(self.weights):
            total = total if number == self.skipped else total * weight.sum()
        return total


def sum_as_one_of_two(spec: TrainSpec, workers: Workers) -> None:
    """Two micro-batches of a step; writes what was summed, and how many buckets started before backward ended."""
    chain = Chain(skipped=None if workers.is_first else 3)
    parameters = list(reversed(list(chain.parameters())))
    summed = GradientSum(parameters, workers, bucket_bytes=64)
    started: list[int] = []
    all_reduce, dist.all_reduce = dist.all_reduce, lambda *a, **k: started.append(1) or all_reduce(*a, **k)
    found = {}
    for step in range(2):
        chain.zero_grad(set_to_none=True)
        chain(1.0 + step).backward()
        early = len(started)
        summed.begin()
        chain(2.0 + workers.rank).backward()
        in_backward = len(started) - early
        summed.finish()
        found = {"early": early, "in_backward": in_backward, "grads": [p.grad.sum().item() for p in parameters]}
        started.clear()
    (spec.path / f"{workers.rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_gradients_are_summed_during_the_last_backward_alone_and_alike_on_both_workers(make_spec, tmp_path):
    train_as_two(sum_as_one_of_two, spec := make_spec(), tmp_path)
    first, second = (json.loads((spec.path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["early"] == second["early"] == 0
    # Four buckets: (2, 7), (400), (5, 3) and what is unused. The second worker has no gradient in the first of them.
    assert first["in_backward"] == 3 and second["in_backward"] == 0
    expected = dict.fromkeys(range(len(SIZES) + 1), 0.0)
    for rank, factors in enumerate((2.0 + 2.0, 2.0 + 3.0)):
        chain = Chain(skipped=None if rank == 0 else 3)
        chain(factors).backward()
        for number, weight in enumerate(reversed(list(chain.parameters()))):
            expected[number] += 0.0 if weight.grad is None else weight.grad.sum().item()
    assert first["grads"] == second["grads"] == pytest.approx(list(expected.values()))


@pytest.mark.parametrize(("most", "scale"), [(1e9, 1.0), (2.0, 0.5)])
def test_gradients_are_clipped_to_a_norm_over_all_of_them(most, scale):
    weights = [nn.Parameter(torch.zeros(shape)) for shape in [(2, 3, 4), (5,), ()]]
    for weight in weights:
        weight.grad = torch.full_like(weight, 4 / 30**0.5)
    before = [weight.grad.clone() for weight in weights]
    assert clip_gradients(dict(zip("abc", weights, strict=True)), most).item() == pytest.approx(4.0)
    for weight, grad in zip(weights, before, strict=True):
        torch.testing.assert_close(weight.grad, scale * grad)
