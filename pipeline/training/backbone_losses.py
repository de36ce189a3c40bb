"""How far the tuned backbone is from the original, or from the text, without ever holding the [N,
V] logits.

The tuned logits are `hidden · Wᵀ + low · Bᵀ`: W is the target's own lm_head, frozen, B the outer
half of its LoRA, and `low` what the inner half makes of the hidden states, scale and dropout
included. The original's are `original · Wᵀ`. The forward pass walks chunks of rows and computes
loss and gradients of a chunk while both logits exist; backward only scales, once per forward.
Softmax and sums are in fp32 (fp64 for fp64), matrix products in the hidden states' dtype.

Letters: N rows (positions), C rows of a chunk, D hidden size, V vocabulary, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.heads.losses import chunk_bytes_on


class TunedHead(NamedTuple):
    """An lm_head with LoRA on it; only `lora_VR` ever gets a gradient."""

    weight_VD: Tensor
    bias_V: Tensor | None
    lora_VR: Tensor


def summed_divergence(
    hidden_ND: Tensor,
    low_NR: Tensor,
    head: TunedHead,
    truth: Tensor,
    *,
    chunk_bytes: int | None = None,
) -> Tensor:
    """How far the tuned model is from `truth`, summed over the rows.

    With the original's states [N, D]: KL(original ‖ tuned) over the whole vocabulary at temperature
    1 (paper 2.3.2). With the tokens that were written, int64 [N]: their cross entropy.
    Differentiable in `hidden_ND`, `low_NR` and `head.lora_VR`. `chunk_bytes` bounds the logits held
    at a time.
    """
    return _SummedDivergence.apply(hidden_ND, low_NR, head.lora_VR, head, truth, chunk_bytes)


class Drift(NamedTuple):
    """Sums over positions: what tuning has changed. fp64 scalars that add up over batches and
    workers.
    """

    kl: Tensor
    original_loss: Tensor  # cross entropy of the text
    tuned_loss: Tensor
    agreed: Tensor  # positions where both would choose the same token
    positions: Tensor

    @classmethod
    def zero(cls, device: torch.device) -> Drift:
        """Of no positions."""
        return cls(*torch.zeros(5, dtype=torch.float64, device=device).unbind())


@torch.no_grad()
def measure_drift(
    hidden_ND: Tensor,
    low_NR: Tensor,
    head: TunedHead,
    original_ND: Tensor,
    labels_N: Tensor,
    *,
    chunk_bytes: int | None = None,
) -> Drift:
    """How the tuned model's predictions differ from the original's where `labels_N` were
    written.
    """
    total = Drift.zero(hidden_ND.device)
    for rows in _chunks(hidden_ND, head, chunk_bytes):
        tuned_CV = _logits(hidden_ND[rows], head, low_NR[rows])
        original_CV = _logits(original_ND[rows].to(hidden_ND.dtype), head)
        agreed_C = tuned_CV.argmax(1) == original_CV.argmax(1)
        log_q_CV, log_p_CV = _log_softmax(tuned_CV), _log_softmax(original_CV)
        labels_C1 = labels_N[rows, None]
        total.original_loss.sub_(log_p_CV.gather(1, labels_C1).sum(dtype=torch.float64))
        total.tuned_loss.sub_(log_q_CV.gather(1, labels_C1).sum(dtype=torch.float64))
        total.kl.add_((log_p_CV.exp() * (log_p_CV - log_q_CV)).sum(dtype=torch.float64))
        total.agreed.add_(agreed_C.sum())
        total.positions.add_(len(agreed_C))
    return total


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
        head = head._replace(lora_VR=lora_VR)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            loss, *ctx.gradients = _walk(
                hidden_ND, low_NR, head, truth, any(ctx.needs_input_grad), chunk_bytes
            )
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor):
        if not ctx.gradients:
            raise RuntimeError(
                "the loss's gradients were already consumed: run the forward pass again"
            )
        gradients, ctx.gradients = (
            ctx.gradients,
            [],
        )  # scaled in place, so good for one backward only
        return *(gradient.mul_(grad_loss) for gradient in gradients), None, None, None


def _walk(
    hidden_ND: Tensor,
    low_NR: Tensor,
    head: TunedHead,
    truth: Tensor,
    wants_gradients: bool,
    chunk_bytes: int | None,
) -> tuple[Tensor, ...]:
    """The loss, then the gradients in hidden, low and lora of the plain sum, chunk by chunk."""
    dtype = hidden_ND.dtype
    loss = torch.zeros((), dtype=_exact(dtype), device=hidden_ND.device)
    gradients = (
        [torch.zeros_like(each) for each in (hidden_ND, low_NR, head.lora_VR)]
        if wants_gradients
        else []
    )
    weight_VD, lora_VR = head.weight_VD.to(dtype), head.lora_VR.to(dtype)
    head = head._replace(weight_VD=weight_VD, lora_VR=lora_VR)
    for rows in _chunks(hidden_ND, head, chunk_bytes):
        low_CR = low_NR[rows].to(dtype)
        log_q_CV = _log_softmax(_logits(hidden_ND[rows], head, low_CR))
        # d loss / d logits is q - onehot(label), or q - p.
        if truth.dtype == torch.int64:
            labels_C1 = truth[rows, None]
            label_log_q_C1 = log_q_CV.gather(1, labels_C1)
            loss -= label_log_q_C1.sum()
            # By expm1, as q - 1 would lose what a confident model still has to learn.
            grad_CV = log_q_CV.exp_().scatter_(1, labels_C1, label_log_q_C1.expm1())
        else:
            log_p_CV = _log_softmax(_logits(truth[rows].to(dtype), head))
            p_CV = log_p_CV.exp()
            loss += log_p_CV.sub_(log_q_CV).mul_(p_CV).sum()
            grad_CV = log_q_CV.exp_().sub_(p_CV)
        if gradients:
            grad_hidden_ND, grad_low_NR, grad_lora_VR = gradients
            grad_CV = grad_CV.to(dtype)
            grad_hidden_ND[rows] = grad_CV @ weight_VD
            grad_low_NR[rows] = (grad_CV @ lora_VR).to(grad_low_NR.dtype)
            grad_lora_VR += grad_CV.t() @ low_CR
    return loss, *gradients


def _chunks(hidden_ND: Tensor, head: TunedHead, chunk_bytes: int | None) -> Iterator[slice]:
    """Ranges of rows whose logits, of both models and with what becomes of them, take
    `chunk_bytes`.
    """
    exact_bytes = _exact(hidden_ND.dtype).itemsize
    row_bytes = len(head.weight_VD) * (2 * hidden_ND.element_size() + 3 * exact_bytes)
    num_rows = max(1, (chunk_bytes or chunk_bytes_on(hidden_ND.device)) // row_bytes)
    for start in range(0, len(hidden_ND), num_rows):
        yield slice(start, start + num_rows)


def _logits(hidden_CD: Tensor, head: TunedHead, low_CR: Tensor | None = None) -> Tensor:
    """The original's logits [C, V], or with `low_CR` the tuned model's."""
    weight_DV = head.weight_VD.to(hidden_CD.dtype).t()
    logits_CV = hidden_CD @ weight_DV
    if low_CR is not None:
        logits_CV.addmm_(low_CR.to(hidden_CD.dtype), head.lora_VR.to(hidden_CD.dtype).t())
    return logits_CV if head.bias_V is None else logits_CV.add_(head.bias_V.to(hidden_CD.dtype))


def _log_softmax(logits_CV: Tensor) -> Tensor:
    return torch.log_softmax(logits_CV, 1, dtype=_exact(logits_CV.dtype))


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
