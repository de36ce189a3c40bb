"""The fake devices themselves: what they notice, and peaks that can be worked out by hand."""

from __future__ import annotations

import pytest
import torch

from tests.fake_cuda.device import FakeGraphs

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
