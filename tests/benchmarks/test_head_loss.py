"""Both sides of the loss benchmark compute the same loss and gradients."""

import torch

from benchmarks.head_loss import Inputs, in_chunks, with_full_logits


def test_both_sides_compute_the_same_loss_and_gradients():
    sides = []
    for loss_of in (in_chunks, with_full_logits):
        inputs = Inputs.random(300, 16)
        loss = loss_of(inputs)
        loss.backward()
        sides.append((loss, inputs.hidden_KND.grad, inputs.lm_head_KVD.grad))
    (loss, hidden, lm_head), (plain_loss, plain_hidden, plain_lm_head) = sides
    torch.testing.assert_close(loss.float(), plain_loss, rtol=1e-3, atol=0)
    torch.testing.assert_close(hidden, plain_hidden, rtol=0.05, atol=1e-3)
    torch.testing.assert_close(lm_head, plain_lm_head, rtol=0.05, atol=2e-2)
