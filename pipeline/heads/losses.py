"""Each head's cross entropy, without ever holding the [K, N, V] logits.

At K = 5, V = 32,000 and 16,384 rows the logits alone would be 10 GB in fp32. Here the forward pass walks chunks of
rows that carry a label, and computes loss and gradients of a chunk while its logits exist: one buffer of logits is all
that is held beside the gradients themselves (two with soft labels: the target's distributions, computed once per chunk
of its states and used by all heads). What needs logits in fp32 is computed by slices of the chunk: so the chunk can be
large, and the [V, D] sum of gradients is read and written seldom. Backward then only scales: once per forward, no
second derivative. Softmax and sums are in fp32 (fp64 for fp64), matrix products in the dtype of the hidden states
(fp16's range is too small).

Letters: N rows (positions), C rows of a chunk, S of a slice, D hidden size, V vocabulary, K heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pipeline.conversations.spans import IGNORED
from pipeline.heads.soft_labels import Teacher

# A GPU wants few, large products; a CPU wants a chunk whose fp32 slices stay in its cache.
_CHUNK_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
_SLICES = 16  # a chunk's bytes over those of a slice


def chunk_bytes_on(device: torch.device) -> int:
    """How many bytes of logits to hold at a time."""
    return _CHUNK_BYTES.get(device.type, 1 << 30)


def rows_at_a_time(vocab_size: int, dtype: torch.dtype, held: int, num_rows: int, chunk_bytes: int) -> tuple[int, int]:
    """The rows of a chunk and of a slice, of `num_rows` in all.

    Held per logit of a chunk: itself, later its gradient, and where two are `held` the target's p, exact; of a slice
    log q, and p in its order, both exact.
    """
    exact_bytes = 8 if dtype == torch.float64 else 4
    chunk = chunk_bytes // (vocab_size * (dtype.itemsize + (held - 1) * exact_bytes))
    chunk = max(1, min(chunk, num_rows))
    return chunk, min(chunk, max(1, chunk_bytes // _SLICES // (vocab_size * exact_bytes * held)))


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


def plain_summed_cross_entropy(
    hidden_KND: Tensor, lm_head: Tensor, labels_KN: Tensor, teacher: Teacher | None = None
) -> Tensor:
    """The same [K] sums by their definition, all logits held and gradients left to autograd: the tests' yardstick."""
    logits_KNV = hidden_KND @ lm_head.mT
    losses_KN = cross_entropy(logits_KNV.flatten(0, 1), labels_KN.flatten(), ignore_index=IGNORED, reduction="none")
    losses_KN = losses_KN.view_as(labels_KN)
    if teacher is not None:
        p_MV = teacher.head.logits(teacher.states_MD.to(hidden_KND.dtype)).softmax(1)
        soft_KN = -(p_MV[teacher.rows_KN.clamp(min=0)] * logits_KNV.log_softmax(2)).sum(2)
        share_KN = teacher.share * ((labels_KN != IGNORED) & (teacher.rows_KN >= 0))
        losses_KN = (1 - share_KN) * losses_KN + share_KN * soft_KN
    return losses_KN.sum(1)


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
        ctx.weights_K = weights_K
        with torch.autocast(hidden_KND.device.type, enabled=False):
            losses_KN, ctx.grad_hidden_KND, ctx.grad_lm_head = _walk(
                hidden_KND, lm_head, labels_KN, teacher, weights_K, ctx.needs_input_grad[:2], chunk_bytes
            )
        return losses_KN.sum(1)

    @staticmethod
    def backward(ctx: Any, grad_sums_K: Tensor):
        grad_hidden_KND, grad_lm_head = ctx.grad_hidden_KND, ctx.grad_lm_head
        ctx.grad_hidden_KND = ctx.grad_lm_head = None  # scaled in place, so good for one backward only
        if grad_hidden_KND is None and grad_lm_head is None:
            raise RuntimeError("the loss's gradients were already consumed: run the forward pass again")
        if grad_hidden_KND is not None:
            grad_hidden_KND.mul_(grad_sums_K[:, None, None])
        if grad_lm_head is not None and grad_lm_head.dim() == 3:
            grad_lm_head.mul_(grad_sums_K[:, None, None])
        elif grad_lm_head is not None and not torch.equal(grad_sums_K, ctx.weights_K.to(grad_sums_K.dtype)):
            raise RuntimeError("with a shared lm_head that trains, weigh the sums by the weights that forward was told")
        return grad_hidden_KND, grad_lm_head, None, None, None, None


def _walk(
    hidden_KND: Tensor,
    lm_head: Tensor,
    labels_KN: Tensor,
    teacher: Teacher | None,
    weights_K: Tensor,
    wants: tuple[bool, ...],
    chunk_bytes: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses [K, N] and the gradients of the losses' plain sum, a shared lm_head's of the weighted one, by chunks."""
    vocab_size, size = lm_head.shape[-2:]
    dtype, exact = hidden_KND.dtype, torch.float64 if hidden_KND.dtype == torch.float64 else torch.float32
    wants_hidden, wants_lm_head = wants
    flat_hidden, flat_labels = hidden_KND.reshape(-1, size), labels_KN.flatten()
    losses = torch.zeros(labels_KN.shape, dtype=exact, device=hidden_KND.device)
    grad_hidden = torch.zeros_like(flat_hidden) if wants_hidden else None
    grad_lm_head = torch.zeros_like(lm_head) if wants_lm_head else None

    held = 1 if teacher is None else 2
    num_rows, slice_rows = rows_at_a_time(vocab_size, dtype, held, flat_labels.numel(), chunk_bytes)
    logits_buffer = flat_hidden.new_empty(num_rows, vocab_size)
    scratch = logits_buffer.new_empty(held, slice_rows, vocab_size, dtype=exact)
    for head, rows_C, soft in _chunks(labels_KN, teacher, logits_buffer, exact, shared=lm_head.dim() == 2):
        weight_VD = (lm_head if head is None else lm_head[head]).to(dtype)
        hidden_CD, labels_C1 = flat_hidden[rows_C], flat_labels[rows_C, None]
        logits_CV = torch.mm(hidden_CD, weight_VD.t(), out=logits_buffer[: len(rows_C)])
        for start in range(0, len(rows_C), slice_rows):
            part = slice(start, start + slice_rows)
            losses.view(-1)[rows_C[part]] = _to_gradient(
                logits_CV[part], labels_C1[part], scratch, soft and soft.part(part), wants_gradient=any(wants)
            )
        if grad_hidden is not None:
            grad_hidden[rows_C] = logits_CV @ weight_VD
        if grad_lm_head is not None and head is not None:
            _add_product(grad_lm_head[head], logits_CV, hidden_CD)
        elif grad_lm_head is not None:
            weights_C = weights_K[rows_C // labels_KN.shape[1]]
            _add_product(grad_lm_head, logits_CV, (hidden_CD * weights_C[:, None]).to(dtype))
    return losses, None if grad_hidden is None else grad_hidden.view_as(hidden_KND), grad_lm_head


class _SoftLabels(NamedTuple):
    """What rows learn besides their labels: the target's p at M of its states, and which of these is each row's."""

    share: float
    p_MV: Tensor
    states_C: Tensor

    def part(self, rows: slice) -> _SoftLabels:
        return self._replace(states_C=self.states_C[rows])


def _to_gradient(
    logits_SV: Tensor, labels_S1: Tensor, scratch: Tensor, soft: _SoftLabels | None, *, wants_gradient: bool
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


def _chunks(
    labels_KN: Tensor, teacher: Teacher | None, logits_buffer: Tensor, exact: torch.dtype, *, shared: bool
) -> Iterator[tuple[int | None, Tensor, _SoftLabels | None]]:
    """The labelled rows of the flattened [K·N], at most a buffer's at a time: (head, rows [C], soft labels).

    The head is None where one lm_head reads the rows of all heads. Rows of which the teacher has no state come last.
    """
    if teacher is not None:
        taught_KN = (labels_KN != IGNORED) & (teacher.rows_KN >= 0)
        yield from _taught_chunks(taught_KN, teacher, logits_buffer, exact, shared=shared)
        labels_KN = labels_KN.masked_fill(taught_KN, IGNORED)
    for head, rows in _rows_by_lm_head(labels_KN, shared=shared):
        for rows_C in rows.split(len(logits_buffer)):
            yield head, rows_C, None


def _taught_chunks(
    taught_KN: Tensor, teacher: Teacher, logits_buffer: Tensor, exact: torch.dtype, *, shared: bool
) -> Iterator[tuple[int | None, Tensor, _SoftLabels]]:
    """Those of `_chunks` with soft labels. The target's distributions are computed once, and used by all heads."""
    num_rows, num_lm_heads = len(logits_buffer), 1 if shared else len(taught_KN)
    rows = taught_KN.flatten().nonzero()[:, 0]
    of_teacher = teacher.rows_KN.flatten()[rows]
    groups = of_teacher // num_rows * num_lm_heads
    groups += 0 if shared else rows // taught_KN.shape[1]
    num_groups = -(-len(teacher.states_MD) // num_rows) * num_lm_heads
    counts = groups.bincount(minlength=num_groups).tolist()
    order = groups.argsort(stable=True)
    found = zip(rows[order].split(counts), of_teacher[order].split(counts), strict=True)
    p_buffer = logits_buffer.new_empty(logits_buffer.shape, dtype=exact)
    for group, (rows_of_group, teachers_of_group) in enumerate(found):
        start = group // num_lm_heads * num_rows
        if group % num_lm_heads == 0:
            states_MD = teacher.states_MD[start : start + num_rows].to(logits_buffer.dtype)
            logits_MV = teacher.head.logits(states_MD, logits_buffer[: len(states_MD)])
            p_MV = torch.softmax(logits_MV, 1, dtype=exact, out=p_buffer[: len(states_MD)])
        for rows_C, teachers_C in zip(rows_of_group.split(num_rows), teachers_of_group.split(num_rows), strict=True):
            soft = _SoftLabels(teacher.share, p_MV, teachers_C - start)
            yield None if shared else group % num_lm_heads, rows_C, soft


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
