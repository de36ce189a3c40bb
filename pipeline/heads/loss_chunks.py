"""How a loss walks the labelled rows of all heads: by lm_head, and by the states that teach them; how many at a time.

Letters: N rows (positions), C rows of a chunk, M states of the target, V vocabulary, K heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.conversations.spans import IGNORED
from pipeline.heads.soft_labels import Teacher

# A GPU wants few, large products; a CPU wants a chunk whose fp32 slices stay in its cache.
_CHUNK_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
_SLICES = 16  # a chunk's bytes over those of a slice, and of a block of a gradient's product


def chunk_bytes_on(device: torch.device) -> int:
    """How many bytes of logits to hold at a time."""
    return _CHUNK_BYTES.get(device.type, 1 << 30)


def rows_at_a_time(vocab_size: int, dtype: torch.dtype, held: int, num_rows: int, chunk_bytes: int) -> tuple[int, int]:
    """The rows of a chunk, of which there are at most `num_rows` (of one lm_head), and of a slice.

    Held per logit of a chunk: itself, later its gradient, and where two are `held` the target's p, exact; of a slice
    log q, and p in its order, both exact.
    """
    exact_bytes = 8 if dtype == torch.float64 else 4
    chunk = chunk_bytes // (vocab_size * (dtype.itemsize + (held - 1) * exact_bytes))
    chunk = max(1, min(chunk, num_rows))
    return chunk, min(chunk, max(1, chunk_bytes // _SLICES // (vocab_size * exact_bytes * held)))


def block_rows(hidden_size: int, dtype: torch.dtype, chunk_bytes: int) -> int:
    """How many of a gradient's V rows are multiplied at a time, where the product is then added in another dtype."""
    return max(1, chunk_bytes // _SLICES // (hidden_size * dtype.itemsize))


class SoftLabels(NamedTuple):
    """What rows learn besides their labels: the target's p at M of its states, and which of these is each row's."""

    share: float
    p_MV: Tensor
    states_C: Tensor

    def part(self, rows: slice) -> SoftLabels:
        return self._replace(states_C=self.states_C[rows])


class Chunk(NamedTuple):
    """Rows [C] of the flattened [K·N] that one lm_head reads, and which of the target's states teach the first of them.

    The head is None where one lm_head reads the rows of all heads.
    """

    head: int | None
    rows_C: Tensor
    taught_by: tuple[int, Tensor] | None = None  # the first state of a buffer of them, each taught row's place in it

    def slices(self, size: int) -> Iterator[tuple[slice, bool]]:
        """At most so many of its rows at a time, and whether the target's states teach them."""
        num_taught = len(self.taught_by[1]) if self.taught_by else 0
        for first, end, is_taught in ((0, num_taught, True), (num_taught, len(self.rows_C), False)):
            for start in range(first, end, size):
                yield slice(start, min(start + size, end)), is_taught


class Taught:
    """The chunks of a loss with soft labels, and the target's distributions, one chunk of its states at a time."""

    def __init__(self, teacher: Teacher, logits_buffer: Tensor, exact: torch.dtype):
        self.teacher, self.rows_KN, self.logits_buffer = teacher, teacher.rows_KN, logits_buffer
        self.p_buffer = logits_buffer.new_empty(logits_buffer.shape, dtype=exact)
        self.held: int | None = None  # the first state of those in the buffer

    def chunks(self, labels_KN: Tensor, rows_KN: Tensor, *, shared: bool) -> Iterator[Chunk]:
        """Labelled rows by the states that teach them; those that none does share the last states' chunk."""
        num_rows, num_lm_heads = len(self.logits_buffer), 1 if shared else len(labels_KN)
        num_blocks = max(1, -(-len(self.teacher.states_MD) // num_rows))
        rows = (labels_KN.flatten() != IGNORED).nonzero()[:, 0]
        of_teacher = rows_KN.flatten()[rows]
        is_untaught = of_teacher < 0
        groups = (of_teacher // num_rows).masked_fill(is_untaught, num_blocks - 1) * num_lm_heads
        groups += 0 if shared else rows // labels_KN.shape[1]
        order = (2 * groups + is_untaught).argsort(stable=True)  # a group's taught rows first
        counts = (2 * groups + is_untaught).bincount(minlength=2 * num_blocks * num_lm_heads).view(-1, 2).tolist()
        sizes = [taught + untaught for taught, untaught in counts]
        found = zip(rows[order].split(sizes), of_teacher[order].split(sizes), counts, strict=True)
        for group, (rows_of_group, teachers_of_group, (num_taught, _)) in enumerate(found):
            head, first = None if shared else group % num_lm_heads, group // num_lm_heads * num_rows
            for start in range(0, len(rows_of_group), num_rows):
                teachers_C = teachers_of_group[start : min(start + num_rows, num_taught)]
                taught_by = (first, teachers_C - first) if len(teachers_C) else None
                yield Chunk(head, rows_of_group[start : start + num_rows], taught_by)

    def soft_labels(self, first: int, states_C: Tensor) -> SoftLabels:
        """What a chunk's rows learn; overwrites the buffer of logits unless these states were the last ones asked for.

        So each distribution is computed once for all heads of a call.
        """
        return SoftLabels(self.teacher.share, self._distributions(first), states_C)

    def _distributions(self, start: int) -> Tensor:
        """The target's p [M, V] at the states from `start` on, as many as the buffer holds."""
        buffer = self.logits_buffer
        states_MD = self.teacher.states_MD[start : start + len(buffer)].to(buffer.dtype)
        p_MV = self.p_buffer[: len(states_MD)]
        if self.held != start:
            logits_MV = self.teacher.head.logits(states_MD, buffer[: len(states_MD)])
            torch.softmax(logits_MV, 1, dtype=p_MV.dtype, out=p_MV)
            self.held = start
        return p_MV


def labelled_chunks(labels_KN: Tensor, num_rows: int, *, shared: bool) -> Iterator[Chunk]:
    """The labelled rows of the flattened [K·N] by the lm_head that reads them: per head, or all at once."""
    rows = (labels_KN.flatten() != IGNORED).nonzero()[:, 0]
    counts = [len(rows)] if shared else (labels_KN != IGNORED).sum(1).tolist()
    for head, rows_of_one in enumerate(rows.split(counts)):
        for start in range(0, len(rows_of_one), num_rows):
            yield Chunk(None if shared else head, rows_of_one[start : start + num_rows])
