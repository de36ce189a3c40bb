from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.medusa.heads import HeadsConfig, MedusaHeads
from pipeline.medusa.losses import IGNORED, head_loss, plain_summed_cross_entropy, summed_cross_entropy

NUM_HEADS, NUM_ROWS, SIZE, VOCAB = 3, 37, 8, 19
ONE_ROW, SEVEN_ROWS = 1, 7 * VOCAB * 16  # chunk sizes in bytes, for fp64


def case(*, tied: bool, ignored: float = 0.3, dtype: torch.dtype = torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(NUM_HEADS, NUM_ROWS, SIZE, generator=generator, dtype=torch.float64)
    lm_head = torch.randn(*(() if tied else (NUM_HEADS,)), VOCAB, SIZE, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCAB, (NUM_HEADS, NUM_ROWS), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < ignored] = IGNORED
    return hidden.to(dtype).requires_grad_(), lm_head.to(dtype).requires_grad_(not tied), labels


def random_heads(tied: bool = False) -> MedusaHeads:
    generator = torch.Generator().manual_seed(1)
    heads = MedusaHeads(HeadsConfig(SIZE, VOCAB, NUM_HEADS, 1, tied), dtype=torch.float64)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return heads


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk_bytes", [ONE_ROW, SEVEN_ROWS, None])
@pytest.mark.parametrize("ignored", [0.0, 0.3, 0.95])
def test_values_and_gradients_equal_the_definition(tied: bool, chunk_bytes: int | None, ignored: float):
    weights = torch.tensor([0.8, 0.0, 0.3], dtype=torch.float64)
    gradients, values = [], []
    for compute in (plain_summed_cross_entropy, summed_cross_entropy):
        hidden, lm_head, labels = case(tied=tied, ignored=ignored)
        settings = {} if compute is plain_summed_cross_entropy else {"chunk_bytes": chunk_bytes}
        result = compute(hidden, lm_head, labels, **settings)
        sums = result if isinstance(result, torch.Tensor) else result[0]
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
        return summed_cross_entropy(hidden, lm_head, labels[:, :4], chunk_bytes=SEVEN_ROWS)[0].sum()

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


def test_each_head_is_weighed_by_its_own_count_and_decay():
    heads, (_, _, labels) = random_heads(), case(tied=False)
    hidden = torch.randn(NUM_ROWS, SIZE, dtype=torch.float64)
    result = head_loss(heads, hidden, labels, decay=0.8)
    logits = heads(hidden)
    expected = sum(0.8 ** (k + 1) * cross_entropy(logits[k], labels[k], ignore_index=IGNORED) for k in range(NUM_HEADS))
    torch.testing.assert_close(result.loss, expected)
    assert result.counts_K.tolist() == [(row != IGNORED).sum().item() for row in labels]


def test_two_accumulated_halves_give_the_loss_and_gradients_of_the_whole():
    hidden, (_, _, labels) = torch.randn(NUM_ROWS, SIZE, dtype=torch.float64), case(tied=False)
    counts = (labels != IGNORED).sum(1)
    whole, parts = random_heads(), random_heads()
    loss = head_loss(whole, hidden, labels).loss
    loss.backward()
    losses = [
        head_loss(parts, hidden[rows], labels[:, rows], denominators_K=counts.tolist()).loss
        for rows in (slice(0, 10), slice(10, None))
    ]
    for part in losses:
        part.backward()
    torch.testing.assert_close(sum(losses), loss)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(parts.get_parameter(name).grad, parameter.grad)


def test_a_head_without_labels_adds_nothing_and_no_nan():
    heads, (_, _, labels) = random_heads(), case(tied=False)
    labels[2] = IGNORED
    result = head_loss(heads, torch.randn(NUM_ROWS, SIZE, dtype=torch.float64), labels)
    result.loss.backward()
    assert result.loss.isfinite() and result.sums_K[2] == 0
    assert heads.lm_head.grad[2].eq(0).all() and heads.lm_head.grad[1].ne(0).any()


@pytest.mark.parametrize("tied", [False, True])
def test_no_labels_at_all_is_a_loss_of_zero(tied: bool):
    heads = random_heads(tied)
    labels = torch.full((NUM_HEADS, 5), IGNORED)
    result = head_loss(heads, torch.randn(5, SIZE, dtype=torch.float64), labels, count_hits=True)
    result.loss.backward()
    assert result.loss == 0 and result.hits_K.tolist() == [0] * NUM_HEADS


def test_hits_count_the_labels_that_are_the_best_guess():
    hidden, lm_head, labels = case(tied=False)
    best = (hidden @ lm_head.mT).argmax(-1)
    labels[:, ::2] = torch.where(labels[:, ::2] == IGNORED, IGNORED, best[:, ::2])
    _, hits = summed_cross_entropy(hidden, lm_head, labels, count_hits=True, chunk_bytes=SEVEN_ROWS)
    assert hits.tolist() == (best == labels).sum(1).tolist()


def test_a_confident_head_in_bfloat16_still_learns():
    """p = 1 - 2^-10 rounds to 1 in bfloat16; its gradient p - 1 must not."""
    hidden = torch.zeros(1, 1, 2, dtype=torch.bfloat16)
    hidden[..., 0] = 1.0
    lm_head = torch.zeros(1, 2, 2, dtype=torch.bfloat16)
    lm_head[0, 0, 0] = 6.9375
    lm_head.requires_grad_()
    summed_cross_entropy(hidden, lm_head, torch.zeros(1, 1, dtype=torch.int64))[0].sum().backward()
    p = torch.softmax(torch.tensor([6.9375, 0.0]), 0)
    torch.testing.assert_close(lm_head.grad[0, 0, 0].float(), p[0] - 1, rtol=1e-2, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_stays_within_its_rounding_of_the_exact_gradients(tied: bool):
    hidden, lm_head, labels = case(tied=tied, dtype=torch.bfloat16)
    sums, _ = summed_cross_entropy(hidden, lm_head, labels)
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
    summed_cross_entropy(hidden, lm_head, labels)[0].sum().backward()
    summed_cross_entropy(hidden, master, labels, chunk_bytes=SEVEN_ROWS)[0].sum().backward()
    assert master.grad.dtype == torch.float32
    torch.testing.assert_close(master.grad, lm_head.grad.float(), rtol=2e-2, atol=5e-2)


def test_under_autocast_hidden_states_stay_in_its_dtype_and_gradients_in_the_weights_own():
    heads, (_, _, labels) = random_heads().float(), case(tied=False)
    hidden = torch.randn(NUM_ROWS, SIZE)
    exact = head_loss(heads, hidden, labels).loss
    with torch.autocast("cpu", torch.bfloat16):
        assert heads.hidden(hidden).dtype == torch.bfloat16
        loss = head_loss(heads, hidden, labels).loss
    loss.backward()
    assert heads.lm_head.grad.dtype == heads.block_weight.grad.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=0)


def test_gradients_are_handed_out_once():
    hidden, lm_head, labels = case(tied=False)
    loss = summed_cross_entropy(hidden, lm_head, labels)[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="consumed"):
        loss.backward()


def test_a_shared_lm_head_that_asks_for_gradients_is_refused():
    hidden, lm_head, labels = case(tied=True)
    with pytest.raises(ValueError, match="frozen"):
        summed_cross_entropy(hidden, lm_head.requires_grad_(), labels)


def test_never_holds_the_logits_of_all_rows():
    """Watches every matrix over the vocabulary that comes up, the [D, V] view of the weights included."""
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
        summed_cross_entropy(hidden, lm_head, labels, chunk_bytes=SEVEN_ROWS)[0].sum().backward()
    assert 7 <= largest <= SIZE < NUM_ROWS
