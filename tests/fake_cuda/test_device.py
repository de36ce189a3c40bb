"""The fake devices themselves: what they notice, and peaks that can be worked out by hand."""

from __future__ import annotations

import pytest
import torch

from tests.fake_cuda.device import FakeGraphs
from tests.fake_cuda.ledger import Ledger

GIB = 1 << 30


def test_a_recorded_step_holds_no_wait_and_no_copy(on_fake_cuda):
    graphs, host, states = FakeGraphs(on_fake_cuda), torch.ones(4), torch.randn(4, 4, device="cuda")
    graphs.capture(lambda: states.mul_(2))
    for step in (
        lambda: states.argmax().tolist(),
        lambda: states.cpu(),
        lambda: states.to("cuda:1"),
        lambda: states.copy_(host, non_blocking=True),
        lambda: (states > 0).nonzero(),
    ):
        with pytest.raises(RuntimeError):
            graphs.capture(step)
    assert graphs.num_captured == 1 and not on_fake_cuda.downloads
    states.cpu(), states.to("cpu", non_blocking=True), states.tolist()
    assert on_fake_cuda.downloads == ["cuda:0"] and on_fake_cuda.waits == ["tolist"]


def test_the_peak_is_of_the_worst_moment(on_fake_cuda):
    held = torch.empty(GIB // 2, dtype=torch.bfloat16, device="cuda")

    with Ledger([held, held[1:]]) as ledger:
        first = torch.empty(GIB, dtype=torch.float32, device="cuda")  # 4 GiB
        view = first[1:].view(torch.int32)
        del first
        twice = view + view  # 4 more
        del view
        twice * 2  # 4 more, when the first are gone
    assert ledger.peak["cuda:0"] == (1 + 8) * GIB - 4


def test_backward_has_gradients_and_frees_saved_tensors(on_fake_cuda):
    """Ten products in a row: each saves its input, and their gradients come when those are freed
    one by one.
    """
    size = 1024
    weights = [torch.empty(size, size, device="cuda", requires_grad=True) for _ in range(10)]

    with Ledger(weights) as ledger:
        state = torch.empty(size, size, device="cuda", requires_grad=True)
        for weight in weights:
            state = state @ weight
        state.sum().backward()
    matrix = 4 * size * size
    assert 20 * matrix < ledger.peak["cuda:0"] <= 25 * matrix
    assert {weight.grad.device for weight in weights} == {torch.device("cuda", 0)}
