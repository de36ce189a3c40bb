"""Each head's cross entropy, without ever holding the [K, N, V] logits.

At K = 5, V = 32,000 and 16,384 rows the logits alone would be 10 GB in fp32. Here the forward pass
computes losses and gradients together, one chunk of rows after another. For each chunk:

    1. choose its rows: labelled ones that one lm_head reads and, with soft labels, that one block
    of states teaches 2. compute their logits, into a buffer that all chunks share 3. compute the
    losses and, in the logits' place, the gradient of the losses, by slices in fp32 4. multiply that
    gradient with the lm_head: the gradient of the hidden states 5. multiply it with the hidden
    states, and add the product to the gradient of the lm_head

Backward only scales: once per forward, no second derivative. A buffer of logits is all that is held
beside the gradients. With soft labels there is a second one, of the target's distributions, which
are computed once per block of its states and used by all heads. Softmax and sums are in fp32 (fp64
for fp64), matrix products in the dtype of the hidden states. fp16's range is too small.

Letters: N rows (positions), C rows of a chunk, S of a slice, M states of the target, D hidden size,
V vocabulary, B of its rows, K heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.conversations.spans import IGNORED
from pipeline.heads.soft_labels import Teacher

# A GPU wants few, large products; a CPU wants a chunk whose fp32 slices stay in its cache.
CHUNK_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
SLICES = 16  # a chunk's bytes over those of a slice, and of a block of a gradient's product


def chunk_bytes_on(device: torch.device) -> int:
    """How many bytes of logits to hold at a time."""
    return CHUNK_BYTES.get(device.type, 1 << 30)


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

    Differentiable in the hidden states and in `lm_head`, which is [K, V, D], or one [V, D] that all
    heads share.

    Args:
        labels_KN: int64, -100 where a head has nothing to learn.
        teacher: The target's distributions, of which the loss is a share; without it the labels are
            all.
        weights_K: What the caller weighs the sums by, exactly (else RuntimeError in backward); all
            1 where it is left out. Only the gradient of a shared lm_head that trains needs to know:
            it is one sum over all heads.
        chunk_bytes: Bounds the logits held at a time.
    """
    device = hidden_KND.device
    if weights_K is None:
        weights_K = torch.ones(len(labels_KN), device=device)
    if chunk_bytes is None:
        chunk_bytes = chunk_bytes_on(device)
    return _SummedCrossEntropy.apply(
        hidden_KND, lm_head, labels_KN, teacher, weights_K, chunk_bytes
    )


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
        wants_hidden, wants_lm_head, *_ = ctx.needs_input_grad
        with torch.autocast(hidden_KND.device.type, enabled=False):
            loss = _Loss(hidden_KND, lm_head, labels_KN, teacher, weights_K, chunk_bytes)
            if wants_hidden:
                loss.grad_hidden_KND = torch.zeros_like(loss.hidden_KND)
            if wants_lm_head:
                loss.grad_lm_head = torch.zeros_like(lm_head)
            for chunk in loss.chunks():
                loss.add(chunk)
        ctx.grad_hidden_KND = loss.grad_hidden_KND
        ctx.grad_lm_head = loss.grad_lm_head
        ctx.weights_K = weights_K
        ctx.is_shared = loss.is_shared
        return loss.losses_KN.sum(1)

    @staticmethod
    def backward(ctx: Any, grad_sums_K: Tensor):
        grad_hidden_KND, grad_lm_head = ctx.grad_hidden_KND, ctx.grad_lm_head
        ctx.grad_hidden_KND = ctx.grad_lm_head = (
            None  # scaled in place, so good for one backward only
        )
        if grad_hidden_KND is None and grad_lm_head is None:
            raise RuntimeError(
                "the loss's gradients were already consumed: run the forward pass again"
            )
        if grad_hidden_KND is not None:
            grad_hidden_KND.mul_(grad_sums_K[:, None, None])
        if grad_lm_head is not None and not ctx.is_shared:
            grad_lm_head.mul_(grad_sums_K[:, None, None])
        if grad_lm_head is not None and ctx.is_shared:
            if not torch.equal(grad_sums_K, ctx.weights_K.to(grad_sums_K.dtype)):
                raise RuntimeError(
                    "with a shared lm_head that trains, weigh the sums by the weights given to"
                    " forward"
                )
        return grad_hidden_KND, grad_lm_head, None, None, None, None


@dataclass(frozen=True)
class _Chunk:
    """Rows of the flattened [K·N] that one lm_head reads. The target's states teach the first of
    them.
    """

    head: int | None  # None where one lm_head reads the rows of all heads
    rows_C: Tensor
    first_state: int = 0  # of the block of states that teaches
    states: Tensor | None = None  # each taught row's state, counted from the block's first

    @property
    def num_taught(self) -> int:
        return 0 if self.states is None else len(self.states)


class _Loss:
    """Losses [K, N], and the gradients of their sum; a shared lm_head's is of the weighted sum."""

    def __init__(
        self,
        hidden_KND: Tensor,
        lm_head: Tensor,
        labels_KN: Tensor,
        teacher: Teacher | None,
        weights_K: Tensor,
        chunk_bytes: int,
    ):
        self.hidden_KND = hidden_KND.contiguous()
        self.lm_head, self.labels_KN = lm_head, labels_KN
        self.teacher, self.weights_K = teacher, weights_K
        self.is_shared = lm_head.dim() == 2
        self.grad_hidden_KND: Tensor | None = None  # zeros, where it is wanted
        self.grad_lm_head: Tensor | None = None

        dtype, vocab_size = hidden_KND.dtype, lm_head.shape[-2]
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        bytes_per_logit, bytes_per_exact = dtype.itemsize, exact.itemsize
        num_exact = (
            1  # numbers that a slice holds of each logit: log q, and with a teacher the target's p
        )
        most_rows = labels_KN.numel() if self.is_shared else labels_KN.shape[1]
        if teacher is not None:
            bytes_per_logit += exact.itemsize
            num_exact = 2
            most_rows = max(most_rows, min(len(teacher.states_MD), labels_KN.numel()))
        self.chunk_rows = max(1, min(most_rows, chunk_bytes // (vocab_size * bytes_per_logit)))
        slice_rows = max(1, chunk_bytes // SLICES // (vocab_size * bytes_per_exact * num_exact))
        self.slice_rows = min(self.chunk_rows, slice_rows)
        self.block_rows = max(1, chunk_bytes // SLICES // (hidden_KND.shape[2] * dtype.itemsize))

        self.losses_KN = torch.zeros(labels_KN.shape, dtype=exact, device=hidden_KND.device)
        self.logits_buffer = hidden_KND.new_empty(self.chunk_rows, vocab_size)
        self.scratch = self.logits_buffer.new_empty(
            num_exact, self.slice_rows, vocab_size, dtype=exact
        )
        self.p_buffer: Tensor | None = None
        self.block_in_buffer: int | None = None  # the first state of those whose p is in the buffer
        if teacher is not None:
            self.p_buffer = torch.empty_like(self.logits_buffer, dtype=exact)

    def chunks(self) -> Iterator[_Chunk]:
        """The labelled rows by the lm_head that reads them, at most a buffer's at a time (pass
        1).
        """
        rows = (self.labels_KN.flatten() != IGNORED).nonzero()[:, 0]
        if self.teacher is not None:
            yield from self._taught_chunks(rows, self.teacher)
            return
        counts = [len(rows)]
        if not self.is_shared:
            counts = (self.labels_KN != IGNORED).sum(1).tolist()
        for head, rows_of_head in enumerate(rows.split(counts)):
            for start in range(0, len(rows_of_head), self.chunk_rows):
                rows_C = rows_of_head[start : start + self.chunk_rows]
                yield _Chunk(None if self.is_shared else head, rows_C)

    def _taught_chunks(self, rows: Tensor, teacher: Teacher) -> Iterator[_Chunk]:
        """The same by the block of states that teaches them; rows without a state are in the last
        block's chunks.
        """
        block_size = self.chunk_rows
        num_blocks = max(1, -(-len(teacher.states_MD) // block_size))
        states = teacher.rows_KN.flatten()[rows]
        is_untaught = states < 0
        group = (states // block_size).masked_fill(is_untaught, num_blocks - 1)
        num_lm_heads = 1
        if not self.is_shared:
            num_lm_heads = len(self.labels_KN)
            group = group * num_lm_heads + rows // self.labels_KN.shape[1]
        key = 2 * group + is_untaught  # the taught rows of a group come first
        order = key.argsort(stable=True)
        rows, states = rows[order], states[order]
        counts = key.bincount(minlength=2 * num_blocks * num_lm_heads).view(-1, 2).tolist()
        start = 0
        for number, (num_taught, num_untaught) in enumerate(counts):
            block, head = divmod(number, num_lm_heads)
            end_taught, end = start + num_taught, start + num_taught + num_untaught
            while start < end:
                stop = min(start + self.chunk_rows, end)
                taught = states[start : min(stop, end_taught)] - block * block_size
                yield _Chunk(
                    None if self.is_shared else head, rows[start:stop], block * block_size, taught
                )
                start = stop

    def add(self, chunk: _Chunk) -> None:
        """Compute the chunk's losses and add its gradients (passes 2 to 5)."""
        rows_C, dtype = chunk.rows_C, self.hidden_KND.dtype
        hidden_CD = self.hidden_KND.view(-1, self.hidden_KND.shape[2])[rows_C]
        labels_C1 = self.labels_KN.flatten()[rows_C, None]
        weight_VD = self.lm_head if chunk.head is None else self.lm_head[chunk.head]
        weight_VD = weight_VD.to(dtype)
        p_MV = None
        if chunk.num_taught:
            p_MV = self._target_distributions(chunk.first_state)  # uses the buffer of logits

        logits_CV = torch.mm(hidden_CD, weight_VD.t(), out=self.logits_buffer[: len(rows_C)])
        flat_losses = self.losses_KN.view(-1)
        for start, stop in self._slices(chunk):
            logits_SV, labels_S1 = logits_CV[start:stop], labels_C1[start:stop]
            if p_MV is None or chunk.states is None or start >= chunk.num_taught:
                losses_S = self._hard_losses(logits_SV, labels_S1)
            else:
                losses_S = self._soft_losses(logits_SV, labels_S1, p_MV, chunk.states[start:stop])
            flat_losses[rows_C[start:stop]] = losses_S

        if self.grad_hidden_KND is not None:
            self.grad_hidden_KND.view(-1, hidden_CD.shape[1])[rows_C] = logits_CV @ weight_VD
        del weight_VD  # a copy where dtypes differ, which the product below need not lie beside
        if self.grad_lm_head is None:
            return
        if chunk.head is None:
            weights_C = self.weights_K[rows_C // self.labels_KN.shape[1]]
            hidden_CD = (hidden_CD * weights_C[:, None]).to(dtype)
            _add_product(self.grad_lm_head, logits_CV, hidden_CD, self.block_rows)
        else:
            _add_product(self.grad_lm_head[chunk.head], logits_CV, hidden_CD, self.block_rows)

    def _slices(self, chunk: _Chunk) -> Iterator[tuple[int, int]]:
        """The slices of a chunk; none has both taught rows and others."""
        for first, end in ((0, chunk.num_taught), (chunk.num_taught, len(chunk.rows_C))):
            for start in range(first, end, self.slice_rows):
                yield start, min(start + self.slice_rows, end)

    def _target_distributions(self, first: int) -> Tensor:
        """The target's p [M, V] at a block of its states; kept until another block is asked for."""
        assert self.teacher is not None and self.p_buffer is not None
        states_MD = self.teacher.states_MD[first : first + self.chunk_rows].to(
            self.logits_buffer.dtype
        )
        p_MV = self.p_buffer[: len(states_MD)]
        if self.block_in_buffer != first:
            logits_MV = self.teacher.head.logits(states_MD, self.logits_buffer[: len(states_MD)])
            torch.softmax(logits_MV, 1, dtype=p_MV.dtype, out=p_MV)
            self.block_in_buffer = first
        return p_MV

    @property
    def _wants_gradient(self) -> bool:
        return self.grad_hidden_KND is not None or self.grad_lm_head is not None

    def _log_softmax(self, logits_SV: Tensor) -> Tensor:
        out_SV = self.scratch[0, : len(logits_SV)]
        return torch.log_softmax(logits_SV, 1, dtype=self.scratch.dtype, out=out_SV)

    def _hard_losses(self, logits_SV: Tensor, labels_S1: Tensor) -> Tensor:
        """Cross entropy [S] with the labels; puts its gradient q - onehot(label) in the logits'
        place.

        The label's entry is expm1(log q): q - 1 in bf16 would be 0 for every confident head.
        """
        log_q_SV = self._log_softmax(logits_SV)
        label_log_q_S1 = log_q_SV.gather(1, labels_S1)
        if self._wants_gradient:
            of_label_S1 = torch.expm1(label_log_q_S1)
            torch.exp(log_q_SV, out=logits_SV).scatter_(
                1, labels_S1, of_label_S1.to(logits_SV.dtype)
            )
        return -label_log_q_S1[:, 0]

    def _soft_losses(
        self, logits_SV: Tensor, labels_S1: Tensor, p_MV: Tensor, states_S: Tensor
    ) -> Tensor:
        """The losses [S] with soft labels, of which `share` is the cross entropy with the target's
        p.

        Puts the gradient q - (1 - share) · onehot(label) - share · p in the logits' place.
        """
        assert self.teacher is not None
        share = self.teacher.share
        log_q_SV = self._log_softmax(logits_SV)
        label_log_q_S1 = log_q_SV.gather(1, labels_S1)
        p_SV = torch.index_select(p_MV, 0, states_S, out=self.scratch[1, : len(logits_SV)])
        soft_losses_S = -torch.bmm(p_SV[:, None], log_q_SV[:, :, None])[:, 0, 0]
        if self._wants_gradient:
            of_label_S1 = torch.expm1(label_log_q_S1)
            of_label_S1 += share * (1 - p_SV.gather(1, labels_S1))
            gradient_SV = log_q_SV.exp_().sub_(p_SV, alpha=share)
            logits_SV.copy_(gradient_SV.scatter_(1, labels_S1, of_label_S1))
        return torch.lerp(-label_log_q_S1[:, 0], soft_losses_S, share)


def _add_product(total_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor, num_rows: int) -> None:
    """total += gradᵀ · hidden, in place; an fp32 total takes bf16 products, of so many of its rows
    at a time.
    """
    if total_VD.dtype == grad_CV.dtype:
        total_VD.addmm_(grad_CV.t(), hidden_CD)
        return
    for total_BD, grad_CB in zip(total_VD.split(num_rows), grad_CV.split(num_rows, 1), strict=True):
        total_BD.add_(grad_CB.t() @ hidden_CD)
