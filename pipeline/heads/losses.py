"""Each head's cross entropy, without ever holding the [K, N, V] logits.

At K = 5, V = 32,000 and 16,384 rows the logits alone would be 10 GB in fp32. Here the forward pass walks chunks of
rows that carry a label, and computes loss and gradients of a chunk while its logits exist: two buffers of one chunk
are all that is held beside the gradients themselves. Backward then only scales: once per forward, no second
derivative. Softmax and sums are in fp32 (fp64 for fp64), matrix products in the dtype of the hidden states (fp16's
range is too small).

Letters: N rows (positions), C rows of a chunk, D hidden size, V vocabulary, K heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pipeline.conversations.spans import IGNORED

# A GPU wants few, large products; a CPU wants a chunk that stays in its cache.
_CHUNK_BYTES = {"cuda": 2 << 30, "cpu": 32 << 20}


def chunk_bytes_on(device: torch.device) -> int:
    """How many bytes of logits to hold at a time."""
    return _CHUNK_BYTES.get(device.type, 1 << 30)


def summed_cross_entropy(
    hidden_KND: Tensor, lm_head: Tensor, labels_KN: Tensor, *, chunk_bytes: int | None = None
) -> Tensor:
    """Each head's cross entropy, summed over its labels: [K], weighted by the caller (paper 2.2.1).

    Differentiable in the hidden states and in `lm_head`, which is [K, V, D], or one [V, D] that all heads share and
    that must be frozen (else ValueError). `labels_KN` int64, -100 where a head has nothing to learn. `chunk_bytes`
    bounds the logits held at a time.
    """
    if lm_head.dim() == 2 and lm_head.requires_grad:
        raise ValueError("a shared lm_head is frozen; detach it, or give every head its own")
    chunk_bytes = chunk_bytes or chunk_bytes_on(hidden_KND.device)
    return _SummedCrossEntropy.apply(hidden_KND, lm_head, labels_KN, chunk_bytes)


def plain_summed_cross_entropy(hidden_KND: Tensor, lm_head: Tensor, labels_KN: Tensor) -> Tensor:
    """The same [K] sums by their definition, all logits held and gradients left to autograd: the tests' yardstick."""
    logits_KNV = hidden_KND @ lm_head.mT
    losses_KN = cross_entropy(logits_KNV.flatten(0, 1), labels_KN.flatten(), ignore_index=IGNORED, reduction="none")
    return losses_KN.view_as(labels_KN).sum(1)


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_KND: Tensor, lm_head: Tensor, labels_KN: Tensor, chunk_bytes: int) -> Tensor:
        with torch.autocast(hidden_KND.device.type, enabled=False):
            losses_KN, ctx.grad_hidden_KND, ctx.grad_lm_head = _walk(
                hidden_KND, lm_head, labels_KN, ctx.needs_input_grad[:2], chunk_bytes
            )
        return losses_KN.sum(1)

    @staticmethod
    def backward(ctx: Any, grad_sums_K: Tensor):
        grad_hidden_KND, grad_lm_head = ctx.grad_hidden_KND, ctx.grad_lm_head
        ctx.grad_hidden_KND = ctx.grad_lm_head = None  # scaled in place, so good for one backward only
        if grad_hidden_KND is None and grad_lm_head is None:
            raise RuntimeError("the loss's gradients were already consumed: run the forward pass again")
        for grad in (grad_hidden_KND, grad_lm_head):
            if grad is not None:
                grad.mul_(grad_sums_K[:, None, None])
        return grad_hidden_KND, grad_lm_head, None, None


def _walk(
    hidden_KND: Tensor, lm_head: Tensor, labels_KN: Tensor, wants: tuple[bool, ...], chunk_bytes: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses [K, N] and the gradients of the losses' plain sum, chunk by chunk."""
    vocab_size, size = lm_head.shape[-2:]
    exact = torch.float64 if hidden_KND.dtype == torch.float64 else torch.float32
    wants_hidden, wants_lm_head = wants
    flat_hidden, flat_labels = hidden_KND.reshape(-1, size), labels_KN.flatten()
    losses = torch.zeros(labels_KN.shape, dtype=exact, device=hidden_KND.device)
    grad_hidden = torch.zeros_like(flat_hidden) if wants_hidden else None
    grad_lm_head = torch.zeros_like(lm_head) if wants_lm_head else None

    # Held per logit: itself (later its gradient), its log p, and, where these differ in dtype, the logit converted.
    logit_bytes = hidden_KND.element_size() + exact.itemsize * (1 if hidden_KND.dtype == exact else 2)
    num_rows = chunk_bytes // (vocab_size * logit_bytes)
    num_rows = max(1, min(num_rows, flat_labels.numel()))
    logits_buffer = flat_hidden.new_empty(num_rows, vocab_size)
    log_p_buffer = logits_buffer.new_empty(num_rows, vocab_size, dtype=exact)
    for head, rows in _rows_by_lm_head(labels_KN, shared=lm_head.dim() == 2):
        weight_VD = (lm_head if head is None else lm_head[head]).to(hidden_KND.dtype)
        for rows_C in rows.split(num_rows):
            hidden_CD, labels_C1 = flat_hidden[rows_C], flat_labels[rows_C, None]
            logits_CV, log_p_CV = logits_buffer[: len(rows_C)], log_p_buffer[: len(rows_C)]
            torch.mm(hidden_CD, weight_VD.t(), out=logits_CV)
            torch.log_softmax(logits_CV, 1, dtype=exact, out=log_p_CV)
            label_log_p_C1 = log_p_CV.gather(1, labels_C1)
            losses.view(-1)[rows_C] = -label_log_p_C1[:, 0]
            if grad_hidden is None and grad_lm_head is None:
                continue
            # d CE / d logits = p - onehot(label), written over the logits. The label's entry from log p: bf16(p) - 1
            # would be 0 for every confident head.
            grad_CV = torch.exp(log_p_CV, out=logits_CV)
            grad_CV.scatter_(1, labels_C1, torch.expm1(label_log_p_C1).to(grad_CV.dtype))
            if grad_hidden is not None:
                grad_hidden[rows_C] = grad_CV @ weight_VD
            if grad_lm_head is not None and head is not None:
                _add_product(grad_lm_head[head], grad_CV, hidden_CD)
    return losses, None if grad_hidden is None else grad_hidden.view_as(hidden_KND), grad_lm_head


def _rows_by_lm_head(labels_KN: Tensor, *, shared: bool) -> Iterator[tuple[int | None, Tensor]]:
    """The labelled rows of the flattened [K·N], grouped by the lm_head that reads them: per head, or all at once."""
    rows = (labels_KN.flatten() != IGNORED).nonzero()[:, 0]
    if shared:
        yield None, rows
        return
    counts = (labels_KN != IGNORED).sum(1).tolist()
    yield from enumerate(rows.split(counts))


def _add_product(total_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    """total += gradᵀ · hidden, in place; an fp32 total takes bf16 products."""
    if total_VD.dtype == grad_CV.dtype:
        total_VD.addmm_(grad_CV.t(), hidden_CD)
    else:
        total_VD.add_(grad_CV.t() @ hidden_CD)
