"""The backbone's loss in Medusa-2, without the [N, V] logits.

The tuned backbone's logits are `hidden · Wᵀ + low · Bᵀ + bias`. W is the target's lm_head and
frozen. B is lora_B of the lm_head, and `low` is lora_A applied to the hidden states, with dropout
and scale. The original model's logits are `original · Wᵀ + bias`. The forward pass computes loss
and gradients together, one chunk of rows after another. For each chunk:

    1. Compute log-probabilities in fp32 (fp64 for fp64): the tuned model's and, for the KL
       divergence, the original's.
    2. Compute the loss and, in the same memory, its gradient with respect to the tuned logits:
       q - p, where p is the original's distribution or, for cross entropy, the one-hot label.
    3. Multiply that gradient with W, with B and with `low`: the gradients of hidden, low and B.

The backward pass only scales these gradients; second derivatives are not supported. Matrix products
are in the dtype of the hidden states.

Letters: N rows (positions), C rows of a chunk, D hidden size, V vocabulary, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.artifacts.check_result import TunedDrift
from pipeline.heads.losses import TargetHead, chunk_bytes_on, exact_dtype


def summed_backbone_loss(
    hidden_ND: Tensor,
    low_NR: Tensor,
    lora_VR: Tensor,
    head: TargetHead,
    labels_N: Tensor,
    original_ND: Tensor | None,
) -> Tensor:
    """Sum the backbone's loss in Medusa-2 training over rows: KL divergence or cross entropy.

    With the original model's hidden states, the loss is KL(original ‖ tuned) over the whole
    vocabulary at temperature 1 (paper 2.3.2). Without them, it is the cross entropy of the next
    tokens. The sum is a scalar and differentiable in the first three arguments.

    Args:
        hidden_ND: The tuned model's hidden states.
        low_NR: lora_A of the lm_head applied to them, with dropout and scale.
        lora_VR: The weight of lora_B of the lm_head.
        head: The target's lm_head; frozen.
        labels_N: The next tokens, int64; used by the cross entropy only.
        original_ND: The original model's hidden states, or None.
    """
    return _SummedBackboneLoss.apply(hidden_ND, low_NR, lora_VR, head, labels_N, original_ND)


class _SummedBackboneLoss(torch.autograd.Function):
    """Autograd function of `summed_backbone_loss`, whose forward pass also computes gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        low_NR: Tensor,
        lora_VR: Tensor,
        head: TargetHead,
        labels_N: Tensor,
        original_ND: Tensor | None,
    ) -> Tensor:
        """Sum the backbone's loss, and keep its gradients in `ctx` for backward."""
        dtype = hidden_ND.dtype
        loss = torch.zeros((), dtype=exact_dtype(dtype), device=hidden_ND.device)
        ctx.gradients = [torch.zeros_like(each) for each in (hidden_ND, low_NR, lora_VR)]
        grad_hidden_ND, grad_low_NR, grad_lora_VR = ctx.gradients
        head = head.to(hidden_ND.device, dtype)
        lora_VR = lora_VR.to(dtype)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for rows in _row_chunks(hidden_ND, head):
                low_CR = low_NR[rows].to(dtype)
                log_q_CV = _tuned_log_probabilities(hidden_ND[rows], low_CR, lora_VR, head)
                if original_ND is None:
                    chunk_loss, grad_CV = _cross_entropy(log_q_CV, labels_N[rows, None])
                else:
                    log_p_CV = _log_softmax(head.logits(original_ND[rows].to(dtype)))
                    chunk_loss, grad_CV = _divergence(log_q_CV, log_p_CV)
                loss += chunk_loss
                grad_CV = grad_CV.to(dtype)
                grad_hidden_ND[rows] = grad_CV @ head.weight_VD
                grad_low_NR[rows] = (grad_CV @ lora_VR).to(low_NR.dtype)
                grad_lora_VR += grad_CV.t() @ low_CR
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor):
        """Return the gradients that the forward pass has computed, scaled by `grad_loss`."""
        gradients = [gradient * grad_loss for gradient in ctx.gradients]
        return *gradients, None, None, None


def _cross_entropy(log_q_CV: Tensor, labels_C1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy and its gradient [C, V], q - onehot(label).

    The gradient overwrites log q.
    """
    label_log_q_C1 = log_q_CV.gather(1, labels_C1)
    # The label's entry is expm1(log q): q - 1 would round to 0 for a confident model.
    grad_CV = log_q_CV.exp_().scatter_(1, labels_C1, label_log_q_C1.expm1())
    return -label_log_q_C1.sum(), grad_CV


def _divergence(log_q_CV: Tensor, log_p_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed KL(p ‖ q) and its gradient [C, V], q - p.

    The gradient overwrites log q; log p is overwritten too.
    """
    p_CV = log_p_CV.exp()
    loss = log_p_CV.sub_(log_q_CV).mul_(p_CV).sum()
    return loss, log_q_CV.exp_().sub_(p_CV)


class Drift(NamedTuple):
    """Sums over positions that compare a tuned backbone with the original, as fp64 scalars."""

    kl: Tensor  # KL(original ‖ tuned)
    original_loss: Tensor  # the original's cross entropy of the text
    tuned_loss: Tensor  # the tuned backbone's
    agreed: Tensor  # positions at which both models choose the same token
    positions: Tensor

    @classmethod
    def zero(cls, device: torch.device) -> Drift:
        """Return sums over no positions, all 0."""
        return cls(*torch.zeros(5, dtype=torch.float64, device=device).unbind())

    def add(self, log_p_NV: Tensor, log_q_NV: Tensor, labels_N: Tensor) -> None:
        """Add N positions to the sums, in place.

        `log_p_NV` are the original's log-probabilities, `log_q_NV` the tuned backbone's, and
        `labels_N` the next tokens.
        """
        labels_N1 = labels_N[:, None]
        self.kl.add_((log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(dtype=torch.float64))
        self.original_loss.sub_(log_p_NV.gather(1, labels_N1).sum(dtype=torch.float64))
        self.tuned_loss.sub_(log_q_NV.gather(1, labels_N1).sum(dtype=torch.float64))
        self.agreed.add_((log_p_NV.argmax(1) == log_q_NV.argmax(1)).sum())
        self.positions.add_(len(labels_N))

    def figures(self) -> TunedDrift:
        """Return the means over positions and both perplexities; all None without positions."""
        kl, original_loss, tuned_loss, agreed, positions = (float(total) for total in self)
        if not positions:
            return TunedDrift()
        original = math.exp(original_loss / positions)
        tuned = math.exp(tuned_loss / positions)
        return TunedDrift(
            kl=kl / positions,
            perplexity={"original": original, "tuned": tuned},
            perplexity_change=tuned / original - 1,
            greedy_agreement=agreed / positions,
            positions=int(positions),
        )


@torch.no_grad()
def add_drift(
    total: Drift,
    hidden_ND: Tensor,
    low_NR: Tensor,
    lora_VR: Tensor,
    head: TargetHead,
    labels_N: Tensor,
    original_ND: Tensor,
) -> None:
    """Add the drift at N positions to `total`, in chunks of rows.

    The other arguments are those of `summed_backbone_loss`.
    """
    dtype = hidden_ND.dtype
    head = head.to(hidden_ND.device, dtype)
    low_NR = low_NR.to(dtype)
    lora_VR = lora_VR.to(dtype)
    for rows in _row_chunks(hidden_ND, head):
        log_q_CV = _tuned_log_probabilities(hidden_ND[rows], low_NR[rows], lora_VR, head)
        log_p_CV = _log_softmax(head.logits(original_ND[rows].to(dtype)))
        total.add(log_p_CV, log_q_CV, labels_N[rows])


def _row_chunks(hidden_ND: Tensor, head: TargetHead) -> Iterator[slice]:
    """Yield slices of the rows, each with at most about `chunk_bytes_on` bytes of logits."""
    exact_bytes = exact_dtype(hidden_ND.dtype).itemsize
    row_bytes = len(head.weight_VD) * (2 * hidden_ND.element_size() + 3 * exact_bytes)
    num_rows = max(1, chunk_bytes_on(hidden_ND.device) // row_bytes)
    for start in range(0, len(hidden_ND), num_rows):
        yield slice(start, start + num_rows)


def _tuned_log_probabilities(
    hidden_CD: Tensor, low_CR: Tensor, lora_VR: Tensor, head: TargetHead
) -> Tensor:
    """Compute the tuned backbone's log-probabilities [C, V]; all arguments have one dtype."""
    return _log_softmax(head.logits(hidden_CD).addmm_(low_CR, lora_VR.t()))


def _log_softmax(logits_CV: Tensor) -> Tensor:
    """Compute log-probabilities [C, V] in fp32 (fp64 for fp64 logits)."""
    return torch.log_softmax(logits_CV, 1, dtype=exact_dtype(logits_CV.dtype))
