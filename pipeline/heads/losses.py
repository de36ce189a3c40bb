"""Each head's cross entropy, without ever holding the [K, N, V] logits.

At K = 5, V = 32,000 and 16,384 rows the logits alone would be 10 GB in fp32. Here the forward pass walks chunks of
rows that carry a label, and computes loss and gradients of a chunk while its logits exist: one buffer of logits is all
that is held beside the gradients themselves (two with soft labels: the target's distributions, computed once per chunk
of its states and used by all heads). What needs logits in fp32 is computed by slices of the chunk: so the chunk can be
large, and the [V, D] sum of gradients is read and written seldom. Backward then only scales: once per forward, no
second derivative. Softmax and sums are in fp32 (fp64 for fp64), matrix products in the dtype of the hidden states
(fp16's range is too small).

Letters: N rows (positions), C rows of a chunk, S of a slice, D hidden size, V vocabulary, B of its rows, K heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pipeline.heads.loss_chunks import (
    Chunk,
    SoftLabels,
    Taught,
    block_rows,
    chunk_bytes_on,
    labelled_chunks,
    rows_at_a_time,
)
from pipeline.heads.soft_labels import Teacher


def summed_cross_entropy(
    hidden_KND: Tensor,
    lm_head: Tensor,
    labels_KN: Tensor,
    teacher: Teacher | None = None,
    weights_K: Tensor | None = None,
    *,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Each head's cross entropy, summed over its labels: [K], weighted by the caller (paper 2.2.1).

    Differentiable in the hidden states and in `lm_head`, which is [K, V, D], or one [V, D] that all heads share.

    Args:
        labels_KN: int64, -100 where a head has nothing to learn.
        teacher: The target's distributions, of which the loss is a share; without it the labels are all.
        weights_K: What the caller weighs the sums by, exactly (else RuntimeError in backward); all 1 where it is left
            out. Only the gradient of a shared lm_head that trains needs to know: it is one sum over all heads.
        chunk_bytes: Bounds the logits held at a time.
    """
    if weights_K is None:
        weights_K = torch.ones(len(labels_KN), device=hidden_KND.device)
    chunk_bytes = chunk_bytes or chunk_bytes_on(hidden_KND.device)
    return _SummedCrossEntropy.apply(hidden_KND, lm_head, labels_KN, teacher, weights_K, chunk_bytes)


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KND: Tensor,
        lm_head: Tensor,
        labels_KN: Tensor,
        teacher: Teacher | None,
        weights_K: Tensor,
        chunk_bytes: int,
    ) -> Tensor:
        ctx.weights_K, ctx.is_weighed = weights_K, lm_head.dim() == 2
        with torch.autocast(hidden_KND.device.type, enabled=False):
            settings = {"wants": ctx.needs_input_grad[:2], "shared": lm_head.dim() == 2, "chunk_bytes": chunk_bytes}
            walk = _Walk(hidden_KND, lm_head.shape[-2], labels_KN, teacher, weights_K, **settings)
            ctx.grad_lm_head = walk.lm_heads(lm_head)
        ctx.grad_hidden_KND = walk.grad_hidden_KND
        return walk.losses_KN.sum(1)

    @staticmethod
    def backward(ctx: Any, grad_sums_K: Tensor):
        grad_hidden_KND, grad_lm_head = ctx.grad_hidden_KND, ctx.grad_lm_head
        ctx.grad_hidden_KND = ctx.grad_lm_head = None  # scaled in place, so good for one backward only
        if grad_hidden_KND is None and grad_lm_head is None:
            raise RuntimeError("the loss's gradients were already consumed: run the forward pass again")
        if grad_hidden_KND is not None:
            grad_hidden_KND.mul_(grad_sums_K[:, None, None])
        if ctx.needs_input_grad[1] and ctx.is_weighed:
            if not torch.equal(grad_sums_K, ctx.weights_K.to(grad_sums_K.dtype)):
                raise RuntimeError(
                    "with a shared lm_head that trains, weigh the sums by the weights that forward was told"
                )
        elif grad_lm_head is not None:
            grad_lm_head.mul_(grad_sums_K[:, None, None])
        return grad_hidden_KND, grad_lm_head, None, None, None, None


class _Walk:
    """Losses [K, N] and the gradients of the losses' plain sum, a shared lm_head's of the weighted one, by chunks."""

    def __init__(
        self,
        hidden_KND: Tensor,
        vocab_size: int,
        labels_KN: Tensor,
        teacher: Teacher | None,
        weights_K: Tensor,
        *,
        wants: tuple[bool, ...],
        shared: bool,  # whether one lm_head reads the rows of all heads
        chunk_bytes: int,
    ):
        self.hidden_KND, self.labels_KN, self.weights_K = hidden_KND.contiguous(), labels_KN, weights_K
        self.wants_hidden, self.wants_lm_head = wants
        dtype, exact = hidden_KND.dtype, torch.float64 if hidden_KND.dtype == torch.float64 else torch.float32
        self.losses_KN = torch.zeros(labels_KN.shape, dtype=exact, device=hidden_KND.device)
        self.grad_hidden_KND = hidden_KND.new_zeros(hidden_KND.shape) if self.wants_hidden else None
        held, num_states = (2, len(teacher.states_MD)) if teacher else (1, 0)
        most = labels_KN.numel() if shared else max(labels_KN.shape[1], min(num_states, labels_KN.numel()))
        num_rows, slice_rows = rows_at_a_time(vocab_size, dtype, held, most, chunk_bytes)
        self.logits_buffer = hidden_KND.new_empty(num_rows, vocab_size)
        self.scratch = self.logits_buffer.new_empty(held, slice_rows, vocab_size, dtype=exact)
        self.taught = Taught(teacher, self.logits_buffer, exact) if teacher else None
        self.block_rows = block_rows(hidden_KND.shape[2], dtype, chunk_bytes)

    def lm_heads(self, lm_head: Tensor) -> Tensor | None:
        """Of all heads, whose lm_heads are [K, V, D] or one [V, D]; returns its gradient."""
        gradient = torch.zeros_like(lm_head) if self.wants_lm_head else None
        for chunk in self._chunks(shared=lm_head.dim() == 2):
            weight_VD = (lm_head if chunk.head is None else lm_head[chunk.head]).to(self.hidden_KND.dtype)
            factors = self._chunk(chunk, weight_VD)
            del weight_VD  # before the next chunk's is made
            if gradient is not None:
                _add_product(gradient if chunk.head is None else gradient[chunk.head], *factors, self.block_rows)
        return gradient

    def _chunk(self, chunk: Chunk, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and the states' gradient of a chunk.

        Returns what the lm_head's gradient is the product of, the logits' gradient [C, V], until the next chunk, and
        states [C, D]; weighed for a shared lm_head.
        """
        rows_C, dtype, num_positions = chunk.rows_C, self.hidden_KND.dtype, self.labels_KN.shape[1]
        soft = self.taught.soft_labels(*chunk.taught_by) if self.taught and chunk.taught_by else None
        labels_C1 = self.labels_KN.flatten()[rows_C, None]
        hidden_CD = self.hidden_KND.view(-1, self.hidden_KND.shape[2])[rows_C]
        logits_CV = torch.mm(hidden_CD, weight_VD.t(), out=self.logits_buffer[: len(rows_C)])
        flat_losses, wants = self.losses_KN.view(-1), self.wants_hidden or self.wants_lm_head
        for part, is_taught in chunk.slices(self.scratch.shape[1]):
            soft_S = soft.part(part) if soft and is_taught else None
            losses_S = _to_gradient(logits_CV[part], labels_C1[part], self.scratch, soft_S, wants_gradient=wants)
            flat_losses[rows_C[part]] = losses_S
        if self.grad_hidden_KND is not None:
            self.grad_hidden_KND.view(-1, hidden_CD.shape[1])[rows_C] = logits_CV @ weight_VD
        if chunk.head is None and self.wants_lm_head:
            weights_C = self.weights_K[rows_C // num_positions]
            hidden_CD = (hidden_CD * weights_C[:, None]).to(dtype)
        return logits_CV, hidden_CD

    def _chunks(self, *, shared: bool) -> Iterator[Chunk]:
        """The labelled rows of the flattened [K·N], at most a buffer's at a time."""
        if self.taught is None:
            return labelled_chunks(self.labels_KN, len(self.logits_buffer), shared=shared)
        return self.taught.chunks(self.labels_KN, self.taught.rows_KN, shared=shared)


def _to_gradient(
    logits_SV: Tensor, labels_S1: Tensor, scratch: Tensor, soft: SoftLabels | None, *, wants_gradient: bool
) -> Tensor:
    """The losses [S] of these rows; turns their logits into the losses' gradient in place, rounded to their dtype last.

    d CE / d logits = q - onehot(label), with soft labels q - (1 - share) · onehot(label) - share · p. The label's entry
    comes from log q: bf16(q) - 1 would be 0 for every confident head.
    """
    log_q_SV = torch.log_softmax(logits_SV, 1, dtype=scratch.dtype, out=scratch[0, : len(logits_SV)])
    label_log_q_S1 = log_q_SV.gather(1, labels_S1)
    losses_S, of_label_S1 = -label_log_q_S1[:, 0], torch.expm1(label_log_q_S1)
    if soft is None:
        if wants_gradient:
            torch.exp(log_q_SV, out=logits_SV).scatter_(1, labels_S1, of_label_S1.to(logits_SV.dtype))
        return losses_S
    p_SV = torch.index_select(soft.p_MV, 0, soft.states_C, out=scratch[1, : len(logits_SV)])
    soft_S = -torch.bmm(p_SV[:, None], log_q_SV[:, :, None])[:, 0, 0]
    if wants_gradient:
        of_label_S1 += soft.share * (1 - p_SV.gather(1, labels_S1))
        gradient_SV = log_q_SV.exp_().sub_(p_SV, alpha=soft.share)
        logits_SV.copy_(gradient_SV.scatter_(1, labels_S1, of_label_S1))
    return torch.lerp(losses_S, soft_S, soft.share)


def _add_product(total_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor, num_rows: int) -> None:
    """total += gradᵀ · hidden, in place; an fp32 total takes bf16 products, of so many of its rows at a time."""
    if total_VD.dtype == grad_CV.dtype:
        total_VD.addmm_(grad_CV.t(), hidden_CD)
        return
    for total_BD, grad_CB in zip(total_VD.split(num_rows), grad_CV.split(num_rows, 1), strict=True):
        total_BD.add_(grad_CB.t() @ hidden_CD)
