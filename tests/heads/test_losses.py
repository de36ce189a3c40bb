from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.conversations.spans import IGNORED
from pipeline.heads.losses import summed_cross_entropy
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape
from tests.fake_cuda.ledger import Ledger
from tests.heads.plain_loss import plain_summed_cross_entropy

NUM_HEADS, NUM_ROWS, SIZE, VOCAB = 3, 37, 8, 19
ONE_ROW, SEVEN_ROWS = 1, 7 * VOCAB * 8  # chunk sizes in bytes, for fp64


def case(*, tied: bool, ignored: float = 0.3, dtype: torch.dtype = torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(NUM_HEADS, NUM_ROWS, SIZE, generator=generator, dtype=torch.float64)
    lm_head = torch.randn(
        *(() if tied else (NUM_HEADS,)), VOCAB, SIZE, generator=generator, dtype=torch.float64
    )
    labels = torch.randint(VOCAB, (NUM_HEADS, NUM_ROWS), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < ignored] = IGNORED
    return hidden.to(dtype).requires_grad_(), lm_head.to(dtype).requires_grad_(not tied), labels


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk_bytes", [ONE_ROW, SEVEN_ROWS, None])
@pytest.mark.parametrize("ignored", [0.0, 0.3, 0.95])
def test_values_and_gradients_equal_the_definition(
    tied: bool, chunk_bytes: int | None, ignored: float
):
    weights = torch.tensor([0.8, 0.0, 0.3], dtype=torch.float64)
    gradients, values = [], []
    for compute in (plain_summed_cross_entropy, summed_cross_entropy):
        hidden, lm_head, labels = case(tied=tied, ignored=ignored)
        settings = {} if compute is plain_summed_cross_entropy else {"chunk_bytes": chunk_bytes}
        sums = compute(hidden, lm_head, labels, **settings)
        (weights * sums).sum().backward()
        values.append(sums.detach())
        gradients.append([hidden.grad] if tied else [hidden.grad, lm_head.grad])
        assert tied is (lm_head.grad is None)
    torch.testing.assert_close(values[1], values[0])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_equal_finite_differences(tied: bool):
    hidden, lm_head, labels = case(tied=tied)
    inputs = (hidden[:, :4].detach().requires_grad_(), lm_head)

    def loss(hidden, lm_head):
        return summed_cross_entropy(hidden, lm_head, labels[:, :4], chunk_bytes=SEVEN_ROWS).sum()

    loss(*inputs).backward()
    step = 1e-6
    for tensor in (each for each in inputs if each.requires_grad):
        index = tuple(size // 2 for size in tensor.shape)
        moved = [[each.detach().clone() for each in inputs] for _ in range(2)]
        which = next(i for i, each in enumerate(inputs) if each is tensor)
        moved[0][which][index] += step
        moved[1][which][index] -= step
        slope = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
        torch.testing.assert_close(tensor.grad[index], slope, rtol=1e-5, atol=1e-7)


def test_a_head_without_labels_has_a_loss_and_gradients_of_zero():
    hidden, lm_head, labels = case(tied=False)
    labels[2] = IGNORED
    sums = summed_cross_entropy(hidden, lm_head, labels)
    sums.sum().backward()
    assert sums[2] == 0 and sums.isfinite().all()
    assert lm_head.grad[2].eq(0).all() and lm_head.grad[1].ne(0).any()


@pytest.mark.parametrize("tied", [False, True])
def test_no_labels_at_all_is_a_loss_of_zero(tied: bool):
    hidden, lm_head, labels = case(tied=tied, ignored=1.0)
    sums = summed_cross_entropy(hidden, lm_head, labels)
    sums.sum().backward()
    assert sums.tolist() == [0.0] * NUM_HEADS and hidden.grad.eq(0).all()


def test_a_confident_head_in_bfloat16_still_learns():
    """p = 1 - 2^-10 rounds to 1 in bfloat16; its gradient p - 1 must not."""
    hidden = torch.zeros(1, 1, 2, dtype=torch.bfloat16)
    hidden[..., 0] = 1.0
    lm_head = torch.zeros(1, 2, 2, dtype=torch.bfloat16)
    lm_head[0, 0, 0] = 6.9375
    lm_head.requires_grad_()
    summed_cross_entropy(hidden, lm_head, torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
    p = torch.softmax(torch.tensor([6.9375, 0.0]), 0)
    torch.testing.assert_close(lm_head.grad[0, 0, 0].float(), p[0] - 1, rtol=1e-2, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_stays_within_its_rounding_of_the_exact_gradients(tied: bool):
    hidden, lm_head, labels = case(tied=tied, dtype=torch.bfloat16)
    sums = summed_cross_entropy(hidden, lm_head, labels)
    sums.sum().backward()
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_lm_head = lm_head.detach().double().requires_grad_(not tied)
    exact = plain_summed_cross_entropy(exact_hidden, exact_lm_head, labels)
    exact.sum().backward()
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), exact, rtol=4e-3, atol=0)
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, rtol=2e-2, atol=4e-2)
    if not tied:
        torch.testing.assert_close(lm_head.grad.double(), exact_lm_head.grad, rtol=2e-2, atol=1e-1)


def test_fp32_master_weights_take_gradients_of_bfloat16_products():
    hidden, lm_head, labels = case(tied=False, dtype=torch.bfloat16)
    master = lm_head.detach().float().requires_grad_()
    summed_cross_entropy(hidden, lm_head, labels).sum().backward()
    summed_cross_entropy(hidden, master, labels, chunk_bytes=SEVEN_ROWS).sum().backward()
    assert master.grad.dtype == torch.float32
    torch.testing.assert_close(master.grad, lm_head.grad.float(), rtol=2e-2, atol=5e-2)


def test_under_autocast_hidden_states_stay_in_its_dtype_and_gradients_in_the_weights_own():
    _, lm_head, labels = case(tied=False, dtype=torch.float32)
    heads = MedusaHeads(MedusaShape(SIZE, VOCAB, NUM_HEADS))
    torch.nn.init.normal_(heads.block_weight)
    hidden = torch.randn(NUM_ROWS, SIZE)
    exact = summed_cross_entropy(heads.hidden(hidden), lm_head, labels)
    with torch.autocast("cpu", torch.bfloat16):
        hidden_in_half = heads.hidden(hidden)
        sums = summed_cross_entropy(hidden_in_half, lm_head, labels)
    sums.sum().backward()
    assert hidden_in_half.dtype == torch.bfloat16
    assert lm_head.grad.dtype == heads.block_weight.grad.dtype == torch.float32
    torch.testing.assert_close(sums, exact, rtol=2e-2, atol=0)


def test_gradients_are_handed_out_once():
    hidden, lm_head, labels = case(tied=False)
    loss = summed_cross_entropy(hidden, lm_head, labels).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="consumed"):
        loss.backward()


def test_a_shared_lm_head_that_trains_takes_its_gradient_from_the_weighted_sum():
    gradients, weights = [], torch.tensor([0.8, 0.0, 0.3], dtype=torch.float64)
    for compute in (plain_summed_cross_entropy, summed_cross_entropy):
        hidden, lm_head, labels = case(tied=True)
        lm_head.requires_grad_()
        told = (
            {}
            if compute is plain_summed_cross_entropy
            else {"weights_K": weights, "chunk_bytes": SEVEN_ROWS}
        )
        (weights * compute(hidden, lm_head, labels, **told)).sum().backward()
        gradients.append([hidden.grad, lm_head.grad])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_shared_lm_head_that_trains_refuses_other_weights_than_it_was_told():
    hidden, lm_head, labels = case(tied=True)
    sums = summed_cross_entropy(hidden, lm_head.requires_grad_(), labels)
    with pytest.raises(RuntimeError, match="weigh the sums"):
        (2 * sums).sum().backward()


def test_never_holds_the_logits_of_all_rows():
    """Watches every matrix over the vocabulary that comes up, the [D, V] view of the weights
    included.
    """
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dim() == 2 and result.shape[1] == VOCAB:
                largest = max(largest, len(result))
            return result

    hidden, lm_head, labels = case(tied=False, ignored=0.0)
    with Watch():
        summed_cross_entropy(hidden, lm_head, labels, chunk_bytes=SEVEN_ROWS).sum().backward()
    assert 7 <= largest <= SIZE < NUM_ROWS


@pytest.mark.parametrize("tied", [False, True])
def test_no_room_is_taken_for_more_rows_than_an_lm_head_reads(tied: bool):
    """Logits in fp64 and their softmax; all else that lives meanwhile is smaller than one head's
    logits.
    """
    hidden, lm_head = (
        torch.randn(3, 64, 2, dtype=torch.float64),
        torch.randn(300, 2, dtype=torch.float64),
    )
    lm_head = lm_head if tied else lm_head.expand(3, -1, -1).contiguous().requires_grad_()
    with Ledger() as ledger:
        summed_cross_entropy(
            hidden, lm_head, torch.zeros(3, 64, dtype=torch.int64), chunk_bytes=1 << 30
        )
    of_one_head = 64 * 300 * 8
    read_by_one = 3 if tied else 1
    assert 2 * read_by_one <= ledger.peak["cpu"] / of_one_head < 2 * read_by_one + 1
