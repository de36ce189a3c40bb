"""The chunked loss, with and without soft labels: equal to its definition, and never more than a
chunk of logits held.
"""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.conversations.spans import IGNORED
from pipeline.heads.losses import TargetHead, Teacher, weighted_cross_entropy
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape
from tests.fake_cuda.ledger import Ledger
from tests.heads.plain_loss import plain_summed_cross_entropy

K, N, M, D, V = 3, 23, 26, 8, 19
WEIGHTS = torch.tensor([0.8, 0.0, 0.3], dtype=torch.float64)
ONES = torch.ones(K)
ROW_BYTES = V * 8 * 2  # of logits in fp64, with the target's
LM_HEADS = ("untied", "tied", "shared")  # tied: one, frozen; shared: one that trains
every_lm_head = pytest.mark.parametrize("lm_heads", LM_HEADS)


def chunks_of(num_bytes: int):
    """Let the loss hold logits of `num_bytes` bytes at a time."""
    return patch.dict("pipeline.heads.losses.CHUNK_BYTES", cpu=num_bytes)


def case(lm_heads: str, share: float | None = None, dtype: torch.dtype = torch.float64):
    """Draw hidden states, lm_heads and labels, and a teacher if there is a share."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden = draw(K, N, D).requires_grad_()
    lm_head = draw(K, V, D) if lm_heads == "untied" else draw(V, D)
    labels = torch.randint(V, (K, N), generator=generator)
    labels[torch.rand(K, N, generator=generator) < 0.3] = IGNORED
    teacher = None
    if share is not None:
        rows = torch.stack([torch.randperm(M, generator=generator)[:N] for _ in range(K)])
        rows[torch.rand(K, N, generator=generator) < 0.2] = -1
        teacher = Teacher(TargetHead(draw(V, D)), draw(M, D), rows, share)
    return hidden, lm_head.requires_grad_(lm_heads != "tied"), labels, teacher


def plain(hidden, lm_head, labels, teacher, weights):
    sums = plain_summed_cross_entropy(hidden, lm_head, labels, teacher)
    return (weights * sums).sum(), sums.detach()


def computed(compute, hidden, lm_head, labels, teacher) -> list[torch.Tensor]:
    """Compute the loss, the sums and the gradients of trained tensors, on copies."""
    hidden = hidden.detach().clone().requires_grad_()
    lm_head = lm_head.detach().clone().requires_grad_(lm_head.requires_grad)
    loss, sums = compute(hidden, lm_head, labels, teacher, WEIGHTS)
    assert not sums.requires_grad
    loss.backward()
    return [loss.detach(), sums, *(each.grad for each in (hidden, lm_head) if each.requires_grad)]


PRESENT = st.sampled_from([0.0, 0.1, 0.7, 1.0])


@every_lm_head
@pytest.mark.parametrize("share", [None, 0.3, 1.0])
@given(st.sampled_from([1, 5, 1000]), PRESENT, PRESENT, st.integers(0, 99))
@settings(deadline=None, max_examples=20)
def test_values_and_gradients_equal_the_definition(
    lm_heads, share, num_rows, labelled, taught, seed
):
    """Also where no position has a teacher, or no head a label."""
    hidden, lm_head, _, teacher = case(lm_heads, share)
    generator = torch.Generator().manual_seed(seed)

    def drawn(high: int, present: float, missing: int) -> torch.Tensor:
        kept = torch.rand(K, N, generator=generator) < present
        return torch.randint(high, (K, N), generator=generator).where(kept, missing)

    labels = drawn(V, labelled, IGNORED)
    teacher = teacher and teacher._replace(rows_KN=drawn(M, taught, -1))
    with chunks_of(num_rows * ROW_BYTES):
        found = computed(weighted_cross_entropy, hidden, lm_head, labels, teacher)
    expected = computed(plain, hidden, lm_head, labels, teacher)
    assert len(found) == (3 if lm_heads == "tied" else 4)
    torch.testing.assert_close(found, expected)


def test_logits_are_scaled_together_with_their_bias_and_then_capped():
    """Bias 1 on a product of 2, scaled by 3: 9, of which a cap of 10 leaves 10 tanh 0.9."""
    head = TargetHead(torch.full((1, 2), 0.5), torch.ones(1), scale=3.0, softcap=10.0)
    assert head.logits(torch.tensor([[1.0, 3.0]])).item() == pytest.approx(10 * math.tanh(0.9))


@pytest.mark.parametrize("share", [None, 0.5])
def test_a_confident_head_in_bfloat16_still_learns(share):
    """Head and target give the label 1 - 2^-10 and 1 - 2^-14, which both round to 1."""
    states = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    lm_head, own = torch.zeros(2, 2, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.bfloat16)
    lm_head[0, 0], own[0, 0] = 6.9375, 9.6875
    label = torch.zeros(1, 1, dtype=torch.int64)
    teacher = Teacher(TargetHead(own), states, label, share) if share else None
    lm_head.requires_grad_()
    loss, _ = weighted_cross_entropy(states[None], lm_head, label, teacher, ONES[:1])
    loss.backward()
    q, p = (torch.sigmoid(torch.tensor(logit)) for logit in (6.9375, 9.6875))
    expected = q - 0.5 - 0.5 * p if share else q - 1
    torch.testing.assert_close(lm_head.grad[0, 0].float(), expected, rtol=1e-2, atol=0)


def test_under_autocast_gradients_stay_in_the_weights_dtype():
    hidden, lm_head, labels, _ = case("untied", dtype=torch.float32)
    heads = MedusaHeads(MedusaShape(D, V, K))
    torch.nn.init.normal_(heads.block_weight)
    exact = plain_summed_cross_entropy(heads.hidden(hidden[0]), lm_head, labels)
    (expected,) = torch.autograd.grad(exact.sum(), lm_head)
    with torch.autocast("cpu", torch.bfloat16), chunks_of(7 * ROW_BYTES):
        in_half = heads.hidden(hidden[0])
        loss, sums = weighted_cross_entropy(in_half, lm_head, labels, None, ONES)
    loss.backward()
    assert in_half.dtype == torch.bfloat16
    assert lm_head.grad.dtype == heads.block_weight.grad.dtype == torch.float32
    torch.testing.assert_close(sums, exact, rtol=2e-2, atol=0)
    torch.testing.assert_close(lm_head.grad, expected, rtol=2e-2, atol=0.3)


@pytest.mark.parametrize(("num_bytes", "factor"), [(1 << 30, 2), (1 << 14, 0)])
@pytest.mark.parametrize("tied", [False, True])
def test_memory_is_bounded_by_a_chunk_and_a_head(num_bytes, factor, tied: bool):
    """Logits in fp64 and their softmax; all else is smaller than one head's logits."""
    hidden, lm_head = torch.randn(3, 64, 2).double(), torch.randn(300, 2).double()
    if not tied:
        lm_head = lm_head.expand(3, -1, -1).contiguous().requires_grad_()
    labels = torch.zeros(3, 64, dtype=torch.int64)
    with chunks_of(num_bytes), Ledger() as ledger:
        weighted_cross_entropy(hidden, lm_head, labels, None, ONES)
    of_one_head, read_by_one = 64 * 300 * 8, 3 if tied else 1
    least = factor * read_by_one
    assert least <= ledger.peak["cpu"] / of_one_head < least + 1
