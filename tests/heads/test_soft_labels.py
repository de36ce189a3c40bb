"""Soft labels: a share of the loss is the cross entropy with the target's own distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.conversations.spans import IGNORED
from pipeline.heads.losses import TargetHead, Teacher, summed_cross_entropy
from tests.heads.plain_loss import plain_summed_cross_entropy

K, N, M, D, V = 3, 23, 26, 8, 19
WEIGHTS = torch.tensor([0.8, 0.0, 0.3], dtype=torch.float64)
ROW_BYTES = V * 8 * 2  # of logits in fp64, with the target's


def case(lm_heads: str, *, share: float, dtype: torch.dtype = torch.float64):
    """Hidden states, lm_heads (`untied`; `tied`: one, frozen; `shared`: one that trains), labels
    and a teacher.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden = draw(K, N, D).requires_grad_()
    lm_head = draw(*((K,) if lm_heads == "untied" else ()), V, D).requires_grad_(lm_heads != "tied")
    labels = torch.randint(V, (K, N), generator=generator)
    labels[torch.rand(K, N, generator=generator) < 0.3] = IGNORED
    rows = torch.stack([torch.randperm(M, generator=generator)[:N] for _ in range(K)])
    rows[torch.rand(K, N, generator=generator) < 0.2] = -1
    return hidden, lm_head, labels, Teacher(TargetHead(draw(V, D)), draw(M, D), rows, share)


def summed(compute, hidden, lm_head, labels, teacher, **settings):
    """The sums and the gradients of what trains."""
    sums = compute(hidden, lm_head, labels, teacher, **settings)
    (WEIGHTS * sums).sum().backward()
    return [sums.detach(), *(each.grad for each in (hidden, lm_head) if each.requires_grad)]


def test_logits_are_scaled_together_with_their_bias_and_then_capped():
    """Bias 1 on a product of 2, scaled by 3: 9, of which a cap of 10 leaves 10 tanh 0.9."""
    head = TargetHead(torch.full((1, 2), 0.5), torch.ones(1), scale=3.0, softcap=10.0)
    assert head.logits(torch.tensor([[1.0, 3.0]])).item() == pytest.approx(10 * math.tanh(0.9))


@pytest.mark.parametrize("lm_heads", ["untied", "tied", "shared"])
@pytest.mark.parametrize("num_rows", [1, 7, 1000])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_values_and_gradients_equal_the_definition(lm_heads: str, num_rows: int, share: float):
    expected = summed(plain_summed_cross_entropy, *case(lm_heads, share=share))
    settings = {"weights_K": WEIGHTS, "chunk_bytes": num_rows * ROW_BYTES}
    torch.testing.assert_close(
        summed(summed_cross_entropy, *case(lm_heads, share=share), **settings), expected
    )


@pytest.mark.slow
@given(st.data())
def test_any_labels_and_any_rows_of_the_teacher(data):
    """Also where no position has a teacher, or no head a label."""
    lm_heads = data.draw(st.sampled_from(["untied", "tied", "shared"]))
    labels = data.draw(st.lists(st.integers(-1, V - 1), min_size=K * N, max_size=K * N))
    rows = data.draw(st.lists(st.integers(-1, M - 1), min_size=K * N, max_size=K * N))
    found = []
    for compute in (plain_summed_cross_entropy, summed_cross_entropy):
        hidden, lm_head, _, teacher = case(lm_heads, share=0.5)
        labels_KN = torch.tensor(labels).view(K, N)
        teacher = teacher._replace(rows_KN=torch.tensor(rows).view(K, N))
        settings = (
            {"weights_K": WEIGHTS, "chunk_bytes": 5 * ROW_BYTES}
            if compute is summed_cross_entropy
            else {}
        )
        found.append(
            summed(
                compute,
                hidden,
                lm_head,
                labels_KN.where(labels_KN >= 0, IGNORED),
                teacher,
                **settings,
            )
        )
    torch.testing.assert_close(found[1], found[0])


def test_without_any_state_of_the_target_the_labels_alone_are_learned_bit_for_bit():
    hidden, lm_head, labels, teacher = case("untied", share=0.5)
    expected = summed(summed_cross_entropy, hidden, lm_head, labels, None)
    hidden, lm_head, labels, _ = case("untied", share=0.5)
    teacher = teacher._replace(rows_KN=torch.full_like(teacher.rows_KN, -1))
    assert all(
        map(torch.equal, summed(summed_cross_entropy, hidden, lm_head, labels, teacher), expected)
    )


def test_a_head_that_predicts_as_the_target_does_has_no_gradient_and_a_loss_of_its_entropy():
    hidden, _, labels, teacher = case("tied", share=1.0)
    labels.fill_(1)
    rows = torch.arange(N).expand(K, N)
    teacher = teacher._replace(states_MD=hidden[0].detach(), rows_KN=rows)
    same = hidden[:1].detach().expand(K, N, D).clone().requires_grad_()
    sums = summed_cross_entropy(same, teacher.head.weight_VD, labels, teacher)
    sums.sum().backward()
    p = torch.distributions.Categorical(logits=hidden[0].detach() @ teacher.head.weight_VD.T)
    torch.testing.assert_close(sums, p.entropy().sum().expand(K))
    torch.testing.assert_close(same.grad, torch.zeros_like(same))


@pytest.mark.parametrize("lm_heads", ["untied", "tied", "shared"])
def test_bfloat16_stays_within_its_rounding_of_the_exact_gradients(lm_heads: str):
    half = case(lm_heads, share=0.5, dtype=torch.bfloat16)
    hidden, lm_head, labels, teacher = half
    sums, *gradients = summed(summed_cross_entropy, *half, weights_K=WEIGHTS)
    exact = (
        hidden.detach().double().requires_grad_(),
        lm_head.detach().double().requires_grad_(lm_heads != "tied"),
    )
    head = teacher.head._replace(weight_VD=teacher.head.weight_VD.double())
    exact_teacher = teacher._replace(head=head, states_MD=teacher.states_MD.double())
    expected, *exact_gradients = summed(plain_summed_cross_entropy, *exact, labels, exact_teacher)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), expected, rtol=1e-2, atol=0)
    for found, right in zip(gradients, exact_gradients, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=3e-2, atol=1e-1)


def test_a_confident_head_in_bfloat16_still_learns_from_a_confident_target():
    """Head and target give the label 1 - 2^-10 and 1 - 2^-14, which both round to 1 in bfloat16."""
    states = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    lm_head, own = torch.zeros(2, 2, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.bfloat16)
    lm_head[0, 0], own[0, 0] = 6.9375, 9.6875
    teacher = Teacher(TargetHead(own), states, torch.zeros(1, 1, dtype=torch.int64), 0.5)
    lm_head.requires_grad_()
    summed_cross_entropy(
        states[None], lm_head, torch.zeros(1, 1, dtype=torch.int64), teacher
    ).sum().backward()
    q, p = (torch.sigmoid(torch.tensor(logit)) for logit in (6.9375, 9.6875))
    torch.testing.assert_close(lm_head.grad[0, 0].float(), q - 0.5 - 0.5 * p, rtol=1e-2, atol=0)


def test_never_holds_the_logits_of_all_rows_and_computes_the_target_s_once_for_all_heads():
    largest, teachers = 0, 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest, teachers
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dim() == 2 and result.shape[1] == V:
                largest = max(largest, len(result))
                teachers += len(result) if func.name().startswith("aten::softmax") else 0
            return result

    hidden, lm_head, labels, teacher = case("untied", share=0.5)
    with Watch():
        summed_cross_entropy(
            hidden, lm_head, labels, teacher, chunk_bytes=7 * ROW_BYTES
        ).sum().backward()
    assert 7 <= largest <= D < N
    assert teachers == M
