from __future__ import annotations

import contextlib
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, kl_div
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.heads.losses import TargetHead
from pipeline.training import backbone_losses as room
from pipeline.training.backbone_losses import Drift, add_drift, summed_backbone_loss

NUM_ROWS, SIZE, VOCAB, RANK = 37, 8, 19, 3
ROW_BYTES = VOCAB * 5 * 8  # of the logits, in fp64
both_losses = pytest.mark.parametrize("loss", ["kl", "ce"])


def in_chunks_of(chunk_rows: int) -> contextlib.AbstractContextManager:
    return patch.object(room, "chunk_bytes_on", lambda device: chunk_rows * ROW_BYTES)


class Case:
    """Random states, adapter and lm_head; the trained ones require gradients."""

    def __init__(self, rows=NUM_ROWS, *, bias=False, seed=0, far=1.0):
        draw = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        self.original = random(rows, SIZE)
        self.hidden = (self.original + far * random(rows, SIZE)).requires_grad_()
        self.low = random(rows, RANK).requires_grad_()
        self.lora = (far * random(VOCAB, RANK)).requires_grad_()
        self.head = TargetHead(random(VOCAB, SIZE), random(VOCAB) if bias else None)
        self.labels = torch.randint(VOCAB, (rows,), generator=draw)

    def log_probabilities(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tuned model's and the original's, from all logits at once."""
        own, bias = self.head.weight_VD.T, self.head.bias_V
        tuned = self.hidden @ own + self.low @ self.lora.T
        original = self.original @ own
        if bias is not None:
            tuned, original = tuned + bias, original + bias
        return tuned.log_softmax(1), original.log_softmax(1)

    def plain(self, loss: str) -> torch.Tensor:
        """The loss by torch's own functions, gradients left to autograd."""
        tuned, original = self.log_probabilities()
        if loss == "ce":
            return cross_entropy(tuned, self.labels, reduction="sum")
        return kl_div(tuned, original, reduction="sum", log_target=True)

    def chunked(self, loss: str, chunk_rows: int) -> torch.Tensor:
        original = self.original if loss == "kl" else None
        with in_chunks_of(chunk_rows):
            return summed_backbone_loss(
                self.hidden, self.low, self.lora, self.head, self.labels, original
            )

    def gradients(self) -> list[torch.Tensor]:
        return [self.hidden.grad, self.low.grad, self.lora.grad]


@settings(max_examples=40)
@given(
    rows=st.integers(0, 9),
    seed=st.integers(0, 10**6),
    far=st.floats(0, 30),
    chunk_rows=st.integers(1, 9),
    bias=st.booleans(),
)
@both_losses
def test_values_and_gradients_equal_the_definition(loss, rows, seed, far, chunk_rows, bias):
    plain, chunked = (Case(rows, bias=bias, seed=seed, far=far) for _ in range(2))
    expected, found = plain.plain(loss), chunked.chunked(loss, chunk_rows)
    (0.3 * expected).backward()
    (0.3 * found).backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(chunked.gradients(), plain.gradients())


def test_a_confident_model_in_bfloat16_still_learns():
    """q = 1 - 2^-10 rounds to 1 in bfloat16; its gradient q - 1 must not."""
    head = TargetHead(torch.tensor([[6.9375], [0.0]]).bfloat16())
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    label = torch.zeros(1, dtype=torch.int64)
    summed_backbone_loss(hidden, torch.zeros(1, 1), torch.zeros(2, 1), head, label, None).backward()
    q = torch.softmax(torch.tensor([6.9375, 0.0]), 0)
    assert float(hidden.grad) == pytest.approx(float((q[0] - 1) * 6.9375), rel=1e-2)


@both_losses
def test_the_logits_of_all_rows_are_never_held(loss):
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dim() == 2 and result.shape[1] == VOCAB:
                largest = max(largest, len(result))
            return result

    case = Case()
    with Watch():
        case.chunked(loss, 7).backward()
    assert 7 <= largest <= SIZE < NUM_ROWS  # the [D, V] view of the weights is seen, too


@pytest.mark.parametrize("chunk_rows", [1, NUM_ROWS])
def test_drift_is_that_of_its_definition(chunk_rows):
    case, rows = Case(far=0.4), torch.arange(NUM_ROWS)
    log_q, log_p = (each.detach() for each in case.log_probabilities())
    arguments = (case.hidden, case.low, case.lora, case.head, case.labels, case.original)
    found = Drift.zero(torch.device("cpu"))
    with in_chunks_of(chunk_rows):
        add_drift(found, *arguments)
    expected = (
        (log_p.exp() * (log_p - log_q)).sum(),
        -log_p[rows, case.labels].sum(),
        -log_q[rows, case.labels].sum(),
        sum(int(p.argmax() == q.argmax()) for p, q in zip(log_p, log_q, strict=True)),
        NUM_ROWS,
    )
    assert [float(each) for each in found] == pytest.approx([float(each) for each in expected])
    assert 0 < found.agreed < NUM_ROWS
