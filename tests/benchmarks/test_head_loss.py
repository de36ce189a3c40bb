"""The loss that the benchmark compares with is the same loss, and bytes are counted as one counts
them by hand.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.head_loss import bytes_moved, loss_of_before, made_inputs
from pipeline.heads.losses import summed_cross_entropy


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_both_losses_have_the_same_gradients(dtype, apart):
    hidden_KND, lm_head_KVD, labels_KN = made_inputs(300, 16, dtype)
    sums_K = summed_cross_entropy(hidden_KND, lm_head_KVD, labels_KN, chunk_bytes=1 << 14)
    sums_K.sum().backward()
    ours = [hidden_KND.grad, lm_head_KVD.grad]
    before_K = loss_of_before(hidden_KND, lm_head_KVD, labels_KN, 1 << 14)
    torch.testing.assert_close(before_K, sums_K, rtol=apart, atol=0)
    for our, theirs in zip(ours, [hidden_KND.grad, lm_head_KVD.grad], strict=True):
        torch.testing.assert_close(our, theirs, rtol=apart, atol=apart)


def test_bytes_are_what_operators_read_and_write():
    matrix, other, picked = torch.zeros(8, 16), torch.zeros(16, 4), torch.tensor([[3], [0]])

    def work(*inputs):
        torch.empty(1000)  # nobody writes it
        product = torch.mm(matrix, other, out=torch.empty(8, 4))  # 8·16 + 16·4 read, 8·4 written
        product.t()[1:].add_(1)  # a view: 3·8 read and written
        torch.zeros(5)  # written
        matrix.copy_(product.new_zeros(8, 16))  # 8·16 written, read and written
        matrix[:2].gather(1, picked)  # 2 read and written
        return product.to(torch.bfloat16)  # 8·4 read, half as many bytes written

    numbers = (128 + 64 + 32) + 2 * 24 + 5 + 3 * 128 + 2 * 2 + 32
    assert bytes_moved(work, (torch.zeros(1),) * 3) == 4 * numbers + 2 * 32
