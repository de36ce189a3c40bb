"""Chunked cross entropy of draft heads, which never holds the [K, N, V] logits.

At K = 5, V = 32,000 and 16,384 rows the logits alone would be 10 GB in fp32. Here the forward pass
computes losses and gradients together, one chunk of rows after another. For each chunk:

    1. Select labelled rows that use the same lm_head and, with soft labels, whose target states
       are in the same block.
    2. Compute their logits into a buffer that all chunks share.
    3. Compute the losses slice by slice in fp32, and replace the logits by their gradient.
    4. Multiply this gradient with the lm_head. The product is the gradient of the hidden states.
    5. Multiply this gradient with the hidden states. Add the product to the lm_head's gradient.

The backward pass only scales the stored gradients. It can run once per forward pass, and second
derivatives are not supported. Beside the gradients, memory is mainly one buffer of logits. Soft
labels need a second buffer for the target's distributions, which are computed once per block of
target states and used by all heads. Softmax and sums are in fp32 (fp64 for fp64 inputs), matrix
products in the dtype of the hidden states. fp16 is not supported: its range is too small for the
summed loss.

Letters: N rows (positions), C rows of a chunk, S rows of a slice, M target states, D hidden size,
V vocabulary size, B vocabulary rows of a block, K heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.conversations.spans import IGNORED

# A GPU wants few, large products; a CPU wants a chunk whose fp32 slices stay in its cache.
CHUNK_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
SLICES = 16  # a chunk has 16 times the bytes of a slice, or of a block of the lm_head's gradient


class TargetHead(NamedTuple):
    """The target's frozen output layer: `softcap · tanh(scale · (W x + b) / softcap)`.

    Without a softcap the logits are `scale · (W x + b)`.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0  # Cohere, Granite
    softcap: float | None = None  # Gemma 2

    def to(self, device: torch.device, dtype: torch.dtype) -> TargetHead:
        """Return the output layer with its tensors on a device, in a dtype."""
        bias_V = None if self.bias_V is None else self.bias_V.to(device, dtype)
        return self._replace(weight_VD=self.weight_VD.to(device, dtype), bias_V=bias_V)

    def of_tokens(self, tokens: Tensor) -> TargetHead:
        """Return an output layer with the rows of these tokens only."""
        bias_V = None if self.bias_V is None else self.bias_V[tokens]
        return self._replace(weight_VD=self.weight_VD[tokens], bias_V=bias_V)

    def logits(self, states_CD: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the target's logits [C, V] in the dtype of the states, into `out` if given."""
        logits_CV = torch.mm(states_CD, self.weight_VD.to(states_CD.dtype).t(), out=out)
        if self.bias_V is not None:
            logits_CV.add_(self.bias_V.to(logits_CV.dtype))
        if self.scale != 1.0:
            logits_CV.mul_(self.scale)
        if self.softcap is not None:
            logits_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_CV


class Teacher(NamedTuple):
    """Soft labels: the target's distributions of the tokens that the heads predict.

    Head k at position t predicts the token at t+2+k. The target's distribution of this token is
    computed from the target's hidden state at t+1+k, which is in the same span.

    The loss of a label is `share` times the cross entropy with the target's distribution, plus
    1 - `share` times the cross entropy with the written token. Without the target's state it is the
    latter alone.

    Attributes:
        head: The target's output layer.
        states_MD: Hidden states of the target.
        rows_KN: The index in `states_MD` of each label's state, int64; -1 if it is not there.
        share: The weight of the soft labels, from 0 to 1.
    """

    head: TargetHead
    states_MD: Tensor
    rows_KN: Tensor
    share: float


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of softmax and sums for inputs of `dtype`: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunk_bytes_on(device: torch.device) -> int:
    """Return roughly how many bytes of logits and soft labels a chunk has on this device."""
    return CHUNK_BYTES.get(device.type, 1 << 30)


def weighted_cross_entropy(
    hidden_KND: Tensor,
    lm_head: Tensor,
    labels_KN: Tensor,
    teacher: Teacher | None,
    weights_K: Tensor,
) -> tuple[Tensor, Tensor]:
    """Sum each head's cross entropy over its labels (paper 2.2.1); return loss and sums.

    The loss is the sum of the heads' sums, each times its weight. It is differentiable in the
    hidden states and in `lm_head`. Backward can run once, and second derivatives are not supported.
    The sums [K] are detached and without weights.

    Args:
        hidden_KND: The input of each head's lm_head.
        lm_head: [K, V, D], or one [V, D] that all heads share.
        labels_KN: Labels as row indices of the lm_head, int64; -100 without a label.
        teacher: Soft labels; None for the cross entropy with the labels only.
        weights_K: The weight of each head's sum.
    """
    return _WeightedCrossEntropy.apply(hidden_KND, lm_head, labels_KN, teacher, weights_K)


class _WeightedCrossEntropy(torch.autograd.Function):
    """Autograd function of the chunked loss; its forward pass also computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KND: Tensor,
        lm_head: Tensor,
        labels_KN: Tensor,
        teacher: Teacher | None,
        weights_K: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute loss and sums chunk by chunk, and keep the loss's gradients in `ctx`."""
        with torch.autocast(hidden_KND.device.type, enabled=False):
            loss = _ChunkedLoss(hidden_KND, lm_head, labels_KN, teacher, weights_K)
            if ctx.needs_input_grad[1]:
                loss.grad_lm_head = torch.zeros_like(lm_head)
            for chunk in loss.chunks():
                loss.add(chunk)
        ctx.gradients = loss.grad_hidden_KND, loss.grad_lm_head
        sums_K = loss.losses_KN.sum(1)
        ctx.mark_non_differentiable(sums_K)
        return (weights_K * sums_K).sum(), sums_K

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor):
        """Scale the gradients that the forward pass has kept, in place; can be called once."""
        grad_hidden_KND, grad_lm_head = ctx.gradients
        ctx.gradients = None  # they are scaled in place, so backward can run once
        grad_hidden_KND.mul_(grad_loss)
        if grad_lm_head is not None:
            grad_lm_head.mul_(grad_loss)
        return grad_hidden_KND, grad_lm_head, None, None, None


@dataclass(frozen=True)
class _Chunk:
    """A chunk of labelled rows, all with the same lm_head and block of target states."""

    head: int  # index of the lm_head; 0 if all heads share one
    rows_C: Tensor  # indices into the flattened [K · N] rows
    first_state: int  # index of the block's first target state
    states_C: Tensor | None  # each row's state as an index into the block; None: hard labels only


class _ChunkedLoss:
    """Computation of the heads' losses: inputs, results, and buffers that all chunks share.

    Attributes:
        losses_KN: The loss of each row; 0 without a label.
        grad_hidden_KND: The gradient of the weighted loss with respect to the hidden states.
        grad_lm_head: The gradient with respect to the lm_heads. None if they are frozen.
        chunk_rows: The maximum number of rows per chunk, and of target states per block.
        slice_rows: The maximum number of rows per slice of a chunk.
        block_rows: The maximum number of vocabulary rows per block of the lm_head's gradient.
    """

    def __init__(
        self,
        hidden_KND: Tensor,
        lm_head: Tensor,
        labels_KN: Tensor,
        teacher: Teacher | None,
        weights_K: Tensor,
    ):
        self.hidden_KND = hidden_KND.contiguous()
        self.lm_head = lm_head
        self.labels_KN = labels_KN
        self.teacher = teacher
        self.weights_K = weights_K
        self.is_shared = lm_head.dim() == 2
        self.grad_hidden_KND = torch.zeros_like(self.hidden_KND)
        self.grad_lm_head: Tensor | None = None  # the caller sets zeros if the lm_head trains

        dtype = hidden_KND.dtype
        vocab_size = lm_head.shape[-2]
        exact = exact_dtype(dtype)
        bytes_per_logit = dtype.itemsize
        num_exact = 1  # numbers that a slice holds per logit: log q, and with a teacher p
        num_labels = labels_KN.numel()
        most_rows = num_labels if self.is_shared else labels_KN.shape[1]
        if teacher is not None:
            bytes_per_logit += exact.itemsize
            num_exact = 2
            most_rows = max(most_rows, min(len(teacher.states_MD), num_labels))
        chunk_bytes = chunk_bytes_on(hidden_KND.device)
        slice_bytes = chunk_bytes // SLICES
        self.chunk_rows = max(1, min(most_rows, chunk_bytes // (vocab_size * bytes_per_logit)))
        slice_rows = max(1, slice_bytes // (vocab_size * exact.itemsize * num_exact))
        self.slice_rows = min(self.chunk_rows, slice_rows)
        self.block_rows = max(1, slice_bytes // (hidden_KND.shape[2] * dtype.itemsize))

        self.losses_KN = hidden_KND.new_zeros(labels_KN.shape, dtype=exact)
        self.logits_buffer = hidden_KND.new_empty(self.chunk_rows, vocab_size)
        scratch_size = (num_exact, self.slice_rows, vocab_size)
        self.scratch = hidden_KND.new_empty(scratch_size, dtype=exact)
        num_states = self.chunk_rows if teacher is not None else 0
        self.p_buffer = hidden_KND.new_empty(num_states, vocab_size, dtype=exact)
        self.block_in_buffer: int | None = None  # `first_state` of the distributions in p_buffer

    def chunks(self) -> Iterator[_Chunk]:
        """Yield chunks of labelled rows that share an lm_head and a block of target states.

        This is step 1 of the module's docstring. Rows without a target state are in separate
        chunks. A chunk has at most `chunk_rows` rows.
        """
        rows = (self.labels_KN.flatten() != IGNORED).nonzero()[:, 0]
        states = torch.full_like(rows, -1)
        num_blocks = 1
        num_lm_heads = 1
        if self.teacher is not None:
            states = self.teacher.rows_KN.flatten()[rows]
            num_blocks = max(1, -(-len(self.teacher.states_MD) // self.chunk_rows))
        is_untaught = states < 0
        group = (states // self.chunk_rows).masked_fill(is_untaught, num_blocks - 1)
        if not self.is_shared:
            num_lm_heads = len(self.labels_KN)
            group = group * num_lm_heads + rows // self.labels_KN.shape[1]
        # Rows with the same key may share a chunk: the same block of states and the same lm_head.
        # Keys are even for rows with a state and odd for rows without.
        key = 2 * group + is_untaught
        counts = key.bincount(minlength=2 * num_blocks * num_lm_heads).tolist()
        for number, members in enumerate(key.argsort(stable=True).split(counts)):
            block, head = divmod(number // 2, num_lm_heads)
            first_state = block * self.chunk_rows
            for chosen in members.split(self.chunk_rows):
                states_C = states[chosen] - first_state if number % 2 == 0 else None
                if len(chosen):
                    yield _Chunk(head, rows[chosen], first_state, states_C)

    def add(self, chunk: _Chunk) -> None:
        """Compute the losses and gradients of a chunk, and store them in the attributes.

        These are steps 2 to 5 of the module's docstring.
        """
        rows_C = chunk.rows_C
        dtype = self.hidden_KND.dtype
        hidden_CD = self.hidden_KND.flatten(0, 1)[rows_C]
        labels_C1 = self.labels_KN.flatten()[rows_C, None]
        weight_VD = self.lm_head if self.is_shared else self.lm_head[chunk.head]
        weight_VD = weight_VD.to(dtype)
        if chunk.states_C is not None:
            self._fill_p_buffer(chunk.first_state)  # overwrites the buffer of logits

        logits_CV = torch.mm(hidden_CD, weight_VD.t(), out=self.logits_buffer[: len(rows_C)])
        for start in range(0, len(rows_C), self.slice_rows):
            part = slice(start, start + self.slice_rows)
            if chunk.states_C is None:
                losses_S = self._hard_losses(logits_CV[part], labels_C1[part])
            else:
                states_S = chunk.states_C[part]
                losses_S = self._soft_losses(logits_CV[part], labels_C1[part], states_S)
            self.losses_KN.view(-1)[rows_C[part]] = losses_S

        weights_C1 = self.weights_K[rows_C // self.labels_KN.shape[1], None]
        grad_CD = (logits_CV @ weight_VD) * weights_C1
        self.grad_hidden_KND.flatten(0, 1)[rows_C] = grad_CD.to(dtype)
        del weight_VD  # a copy where dtypes differ; free it before the product below
        if self.grad_lm_head is None:
            return
        total_VD = self.grad_lm_head if self.is_shared else self.grad_lm_head[chunk.head]
        weighted_CD = (hidden_CD * weights_C1).to(dtype)
        _add_product(total_VD, logits_CV, weighted_CD, self.block_rows)

    def _fill_p_buffer(self, first: int) -> None:
        """Fill `p_buffer` with the soft labels of the block of target states from `first` on.

        If the buffer holds this block already, nothing is done. Otherwise the buffer of logits is
        overwritten.
        """
        assert self.teacher is not None
        if self.block_in_buffer == first:
            return
        states_MD = self.teacher.states_MD[first : first + self.chunk_rows]
        states_MD = states_MD.to(self.logits_buffer.dtype)
        logits_MV = self.teacher.head.logits(states_MD, self.logits_buffer[: len(states_MD)])
        p_MV = self.p_buffer[: len(states_MD)]
        torch.softmax(logits_MV, 1, dtype=p_MV.dtype, out=p_MV)
        self.block_in_buffer = first

    def _log_softmax(self, logits_SV: Tensor) -> Tensor:
        """Compute a slice's log-probabilities log q [S, V] in the first scratch buffer."""
        out_SV = self.scratch[0, : len(logits_SV)]
        return torch.log_softmax(logits_SV, 1, dtype=self.scratch.dtype, out=out_SV)

    def _hard_losses(self, logits_SV: Tensor, labels_S1: Tensor) -> Tensor:
        """Compute the cross entropy [S] with the labels; replace the logits by its gradient.

        The gradient is q - onehot(label), where q is the softmax. The label's entry is computed as
        expm1(log q), because q - 1 in bf16 is 0 if q is close to 1.
        """
        log_q_SV = self._log_softmax(logits_SV)
        label_log_q_S1 = log_q_SV.gather(1, labels_S1)
        at_label_S1 = torch.expm1(label_log_q_S1).to(logits_SV.dtype)
        torch.exp(log_q_SV, out=logits_SV).scatter_(1, labels_S1, at_label_S1)
        return -label_log_q_S1[:, 0]

    def _soft_losses(self, logits_SV: Tensor, labels_S1: Tensor, states_S: Tensor) -> Tensor:
        """Compute the losses [S] with labels and soft labels; replace the logits by the gradient.

        The loss is `share` times the cross entropy with the soft labels p, plus 1 - `share` times
        that with the label. Its gradient is q - (1 - share) · onehot(label) - share · p, where q is
        the softmax.
        """
        assert self.teacher is not None
        share = self.teacher.share
        log_q_SV = self._log_softmax(logits_SV)
        label_log_q_S1 = log_q_SV.gather(1, labels_S1)
        p_SV = torch.index_select(self.p_buffer, 0, states_S, out=self.scratch[1, : len(logits_SV)])
        soft_losses_S = -torch.bmm(p_SV[:, None], log_q_SV[:, :, None])[:, 0, 0]
        at_label_S1 = torch.expm1(label_log_q_S1) + share * (1 - p_SV.gather(1, labels_S1))
        gradient_SV = log_q_SV.exp_().sub_(p_SV, alpha=share)
        logits_SV.copy_(gradient_SV.scatter_(1, labels_S1, at_label_S1))
        return torch.lerp(-label_log_q_S1[:, 0], soft_losses_S, share)


def _add_product(total_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor, num_rows: int) -> None:
    """Add gradᵀ · hidden to `total_VD`, the gradient of an lm_head, in place.

    If the dtypes differ, compute the product for `num_rows` vocabulary rows at a time.
    """
    if total_VD.dtype == grad_CV.dtype:
        total_VD.addmm_(grad_CV.t(), hidden_CD)
        return
    for total_BD, grad_CB in zip(total_VD.split(num_rows), grad_CV.split(num_rows, 1), strict=True):
        total_BD.add_(grad_CB.t() @ hidden_CD)
