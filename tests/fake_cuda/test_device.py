"""The fake devices themselves: what they notice, and that nobody else notices them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorDeviceMismatchError,
)

from tests.fake_cuda.device import FakeGraphs, fake_cuda


def test_waits_copies_and_mismatches_are_noticed(on_fake_cuda):
    seen = on_fake_cuda
    known = torch.tensor([3, 0, 4], device="cuda")
    assert seen.uploads == ["cpu -> cuda:0"] and not seen.waits
    assert known.nonzero()[:, 0].tolist() == [0, 2] and seen.waits == ["nonzero", "tolist"]
    assert int(known.sum()) == 7 and (known > 3).tolist() == [False, False, True]

    unknown = torch.randn(3, 5, device="cuda").argmax(1)
    seen.waits.clear()
    assert unknown.tolist() == [0, 0, 0] and seen.waits == ["tolist"]
    for read in (unknown[0].item, unknown.nonzero, lambda: bool((unknown == 1).any())):
        with pytest.raises((DataDependentOutputException, RuntimeError)):
            read()
    known.copy_(unknown)
    assert known.tolist() == [0, 0, 0], "an integer that was overwritten is not known any more"

    seen.transfers.clear()
    unknown.cpu(), unknown.to("cpu", non_blocking=True), unknown.to("cuda:1")
    assert seen.transfers == ["cuda:0 -> cpu", "cuda:0 -> cpu", "cuda:0 -> cuda:1"]
    assert seen.downloads == ["cuda:0 -> cpu"]
    with pytest.raises(FakeTensorDeviceMismatchError):
        unknown + torch.ones(3, device="cuda:1")


def test_a_recorded_step_holds_no_wait_and_no_copy(on_fake_cuda):
    graphs, host, states = FakeGraphs(on_fake_cuda), torch.ones(4), torch.randn(4, 4, device="cuda")
    graphs.capture(lambda: states.mul_(2))
    for step in (
        lambda: states.argmax().tolist(),
        lambda: states.cpu(),
        lambda: states.to("cuda:1"),
        lambda: states.copy_(host, non_blocking=True),
        lambda: states[host.long()],
        lambda: torch.tensor([1, 2], device="cuda"),
        lambda: (states > 0).nonzero(),
    ):
        with pytest.raises(RuntimeError):
            graphs.capture(step)
    assert graphs.num_captured == 1


def test_backward_has_the_gradients_of_torch_and_frees_what_it_has_used(on_fake_cuda):
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).to(
        "cuda"
    )
    states = torch.randn(5, 4, device="cuda", requires_grad=True)
    (net(states) * states[:, :1]).mean().backward()
    assert states.grad.shape == (5, 4) and states.grad.is_cuda
    assert all(
        weight.grad.shape == weight.shape and weight.grad.is_cuda for weight in net.parameters()
    )


def test_real_tensors_do_not_notice():
    with fake_cuda():
        pass
    weight = torch.randn(3, requires_grad=True)
    weight.square().sum().backward()
    assert torch.equal(weight.grad, 2 * weight.detach())
    assert not torch.cuda.is_available() and torch.zeros(2).tolist() == [0.0, 0.0]
