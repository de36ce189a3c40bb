"""Peaks that can be worked out by hand."""

from __future__ import annotations

import torch

from tests.fake_cuda.ledger import peak_bytes

GIB = 1 << 30


def test_peak_is_what_lies_there_at_the_worst_moment(on_fake_cuda):
    held = torch.empty(GIB // 2, dtype=torch.bfloat16, device="cuda")

    def program():
        first = torch.empty(GIB, dtype=torch.float32, device="cuda")  # 4 GiB
        view = first[1:].view(torch.int32)
        del first
        twice = view + view  # 4 more
        del view
        return twice * 2  # 4 more, when the first are gone

    peak = peak_bytes(program, [held, held[1:]])
    assert peak["cuda:0"] == (1 + 8) * GIB - 4


def test_backward_frees_what_forward_saved(on_fake_cuda):
    """Ten products in a row: each saves its input, and their gradients come when those are freed
    one by one.
    """
    size = 1024
    weights = [torch.empty(size, size, device="cuda", requires_grad=True) for _ in range(10)]

    def step():
        state = torch.empty(size, size, device="cuda", requires_grad=True)
        for weight in weights:
            state = state @ weight
        state.sum().backward()

    matrix = 4 * size * size
    assert 20 * matrix < peak_bytes(step, weights)["cuda:0"] <= 25 * matrix
