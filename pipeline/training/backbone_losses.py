"""The tuned backbone's loss against the original or the text, without the [N, V] logits.

The tuned logits are `hidden · Wᵀ + low · Bᵀ`: W is the target's frozen lm_head, B the outer half of
its LoRA, and `low` the inner half applied to the hidden states, with scale and dropout. The
original's logits are `original · Wᵀ`. The forward pass computes loss and gradients together, one
chunk of rows after another. For each chunk:

    1. compute both models' log-probabilities, in fp32 (fp64 for fp64)
    2. compute the loss and, in the same memory, its gradient in the logits: q - p
    3. multiply that gradient with W, with B, and with `low`: the gradients of hidden, low and B

Backward only scales; there is no second derivative. Matrix products are in the dtype of
the hidden states.

Letters: N rows (positions), C rows of a chunk, D hidden size, V vocabulary, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.artifacts.check_result import TunedDrift
from pipeline.heads.losses import chunk_bytes_on


class TunedHead(NamedTuple):
    """The lm_head of a backbone tuned with LoRA; only `lora_VR` is trained."""

    weight_VD: Tensor
    bias_V: Tensor | None
    lora_VR: Tensor

    def to(self, dtype: torch.dtype) -> TunedHead:
        bias_V = None if self.bias_V is None else self.bias_V.to(dtype)
        return TunedHead(self.weight_VD.to(dtype), bias_V, self.lora_VR.to(dtype))


def summed_divergence(
    hidden_ND: Tensor,
    low_NR: Tensor,
    head: TunedHead,
    truth: Tensor,
    *,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Sum the tuned backbone's KL divergence or cross entropy over the rows.

    If `truth` is the original model's hidden states [N, D], compute KL(original ‖ tuned) over the
    whole vocabulary at temperature 1 (paper 2.3.2). If `truth` is token ids, int64 [N], compute
    their cross entropy. Differentiable in `hidden_ND`, `low_NR` and `head.lora_VR`. `chunk_bytes`
    bounds the memory of the logits.
    """
    return _SummedDivergence.apply(hidden_ND, low_NR, head.lora_VR, head, truth, chunk_bytes)


class _SummedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        low_NR: Tensor,
        lora_VR: Tensor,
        head: TunedHead,
        truth: Tensor,
        chunk_bytes: int | None,
    ) -> Tensor:
        dtype = hidden_ND.dtype
        loss = torch.zeros((), dtype=_exact(dtype), device=hidden_ND.device)
        ctx.gradients = [torch.zeros_like(each) for each in (hidden_ND, low_NR, lora_VR)]
        grad_hidden_ND, grad_low_NR, grad_lora_VR = ctx.gradients
        head = head.to(dtype)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for rows in _chunks(hidden_ND, head, chunk_bytes):
                low_CR = low_NR[rows].to(dtype)
                log_q_CV = _log_softmax(_logits(hidden_ND[rows], head, low_CR))
                if truth.dtype == torch.int64:
                    chunk_loss, grad_CV = _cross_entropy(log_q_CV, truth[rows, None])
                else:
                    log_p_CV = _log_softmax(_logits(truth[rows].to(dtype), head))
                    chunk_loss, grad_CV = _divergence(log_q_CV, log_p_CV)
                loss += chunk_loss
                grad_CV = grad_CV.to(dtype)
                grad_hidden_ND[rows] = grad_CV @ head.weight_VD
                grad_low_NR[rows] = (grad_CV @ head.lora_VR).to(low_NR.dtype)
                grad_lora_VR += grad_CV.t() @ low_CR
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor):
        gradients = [gradient * grad_loss for gradient in ctx.gradients]
        return *gradients, None, None, None


def _cross_entropy(log_q_CV: Tensor, labels_C1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy and its gradient q - onehot(label), stored in log_q_CV."""
    label_log_q_C1 = log_q_CV.gather(1, labels_C1)
    # The label's entry is expm1(log q): q - 1 would round to 0 for a confident model.
    grad_CV = log_q_CV.exp_().scatter_(1, labels_C1, label_log_q_C1.expm1())
    return -label_log_q_C1.sum(), grad_CV


def _divergence(log_q_CV: Tensor, log_p_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed KL(p ‖ q) and its gradient q - p in q's logits, stored in log_q_CV."""
    p_CV = log_p_CV.exp()
    loss = log_p_CV.sub_(log_q_CV).mul_(p_CV).sum()
    return loss, log_q_CV.exp_().sub_(p_CV)


class Drift(NamedTuple):
    """Sums of a tuned backbone's drift over positions, as fp64 scalars."""

    kl: Tensor
    original_loss: Tensor  # cross entropy of the text
    tuned_loss: Tensor
    agreed: Tensor  # positions at which both models choose the same token
    positions: Tensor

    @classmethod
    def zero(cls, device: torch.device) -> Drift:
        return cls(*torch.zeros(5, dtype=torch.float64, device=device).unbind())

    def add(self, log_p_NV: Tensor, log_q_NV: Tensor, labels_N: Tensor) -> None:
        """Add the drift at positions, given the original and tuned models' log-probabilities."""
        labels_N1 = labels_N[:, None]
        self.kl.add_((log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(dtype=torch.float64))
        self.original_loss.sub_(log_p_NV.gather(1, labels_N1).sum(dtype=torch.float64))
        self.tuned_loss.sub_(log_q_NV.gather(1, labels_N1).sum(dtype=torch.float64))
        self.agreed.add_((log_p_NV.argmax(1) == log_q_NV.argmax(1)).sum())
        self.positions.add_(len(labels_N))

    def figures(self) -> TunedDrift:
        """Return the backbone's mean drift per position; all fields are None without positions."""
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
    head: TunedHead,
    original_ND: Tensor,
    labels_N: Tensor,
    *,
    chunk_bytes: int | None = None,
) -> None:
    """Add the tuned backbone's drift at positions with next tokens `labels_N` to `total`."""
    head = head.to(hidden_ND.dtype)
    for rows in _chunks(hidden_ND, head, chunk_bytes):
        log_q_CV = _log_softmax(_logits(hidden_ND[rows], head, low_NR[rows]))
        log_p_CV = _log_softmax(_logits(original_ND[rows].to(hidden_ND.dtype), head))
        total.add(log_p_CV, log_q_CV, labels_N[rows])


def _chunks(hidden_ND: Tensor, head: TunedHead, chunk_bytes: int | None) -> Iterator[slice]:
    """Yield slices of rows such that the logits of both models take about `chunk_bytes`."""
    exact_bytes = _exact(hidden_ND.dtype).itemsize
    row_bytes = len(head.weight_VD) * (2 * hidden_ND.element_size() + 3 * exact_bytes)
    num_rows = max(1, (chunk_bytes or chunk_bytes_on(hidden_ND.device)) // row_bytes)
    for start in range(0, len(hidden_ND), num_rows):
        yield slice(start, start + num_rows)


def _logits(hidden_CD: Tensor, head: TunedHead, low_CR: Tensor | None = None) -> Tensor:
    """Compute the original model's logits [C, V], or with `low_CR` the tuned model's logits."""
    logits_CV = hidden_CD @ head.weight_VD.t()
    if low_CR is not None:
        logits_CV.addmm_(low_CR.to(hidden_CD.dtype), head.lora_VR.t())
    if head.bias_V is not None:
        logits_CV.add_(head.bias_V)
    return logits_CV


def _log_softmax(logits_CV: Tensor) -> Tensor:
    return torch.log_softmax(logits_CV, 1, dtype=_exact(logits_CV.dtype))


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
