"""Training batches of cached hidden states: the plan of an epoch, and prefetching.

Heads read one hidden state each, so a batch is a flat set of *positions*, without padding: a row
may be split between batches, whatever its length. The epoch's row groups are shuffled, and the
rows within each group. Placed end to end, the rows form a line of positions, which is cut into
`LANES` equal lanes. Step s takes the s-th equal part of every lane. So:

- every position is read once per epoch;
- batch sizes differ by at most one position per lane;
- each batch mixes rows of `LANES` row groups from all over the data, and few more row groups are in
  memory at once;
- the positions of any (epoch, step) are computed directly, without reading the steps before;
- a batch is the same for any number of workers; each worker reads a contiguous, equal share.

Limits: large row groups are shuffled less finely; a row group in two lanes is read twice.

A pool of threads reads row groups in the order in which the plan needs them; one more thread
assembles batches.

Letters: N positions, D hidden size, K heads, M states that predict labels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.artifacts.feature_rows import FeatureRow, FeatureRows
from pipeline.heads.rows import Rows
from pipeline.training.task import ALONE, Workers

LANES = 16
NUM_READERS = 4  # threads
BATCHES_AHEAD = 2  # assembled batches that wait for the loop
STEPS_AHEAD = 4  # steps whose row groups are being read
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Piece:
    """A range [start, stop) of training positions in one cached row of one row group."""

    group: int
    row: int
    start: int
    stop: int

    def __len__(self) -> int:
        """Return the number of training positions in this piece."""
        return self.stop - self.start


class EpochPlan:
    """Plan of one training epoch: the cached positions that each step reads.

    Args:
        lengths: Per row group, the number of positions of each of its rows; 0 leaves a row out.
        batch_tokens: The number of positions per step over all workers. Steps may have fewer, and
            exceed it by at most one position per lane.
        seed: Seed of the shuffle.
        epoch: The epoch's number; each epoch has its own order.
        limit: Plan only the first `limit` positions of the shuffled line.
    """

    def __init__(
        self,
        lengths: Sequence[npt.NDArray[np.int64]],
        *,
        batch_tokens: int,
        seed: int,
        epoch: int = 0,
        limit: int | None = None,
    ):
        random = np.random.default_rng([seed, epoch])
        groups = random.permutation(len(lengths))
        rows = [random.permutation(np.flatnonzero(lengths[group])) for group in groups]
        sizes = [lengths[group][order] for group, order in zip(groups, rows, strict=True)]
        self._groups = np.repeat(groups, [len(order) for order in rows])
        self._rows = np.concatenate([*rows, np.empty(0, np.int64)])
        # Row i of the line is [edges[i], edges[i+1]).
        self._edges = np.cumsum(np.concatenate([[0], *sizes]))
        self.num_positions = int(self._edges[-1])
        if limit is not None:
            self.num_positions = min(self.num_positions, limit)
        self.num_steps = -(-self.num_positions // batch_tokens)
        # Fewer lanes if there are too few positions for every lane to give one to each step.
        num_lanes = min(LANES, self.num_positions // max(1, self.num_steps))
        self._lanes = [
            split_range(0, self.num_positions, lane, num_lanes) for lane in range(num_lanes)
        ]

    def size(self, step: int) -> int:
        """Return the number of positions in a training step, over all workers."""
        return sum(stop - start for start, stop in self._ranges(step))

    def share(self, step: int, workers: Workers) -> tuple[int, int]:
        """Return the range [start, stop) of a training step's positions that one worker reads."""
        return split_range(0, self.size(step), workers.rank, workers.world_size)

    def pieces(self, step: int, workers: Workers = ALONE) -> list[Piece]:
        """Return the ranges of cached rows that one worker reads in a training step.

        The list may be empty if the step has fewer positions than there are workers.
        """
        first, last = self.share(step, workers)
        found = []
        offset = 0  # of a range within the step
        for low, high in self._ranges(step):
            start = low + max(first - offset, 0)
            stop = min(low + last - offset, high)
            if start < stop:
                found += self._pieces_between(start, stop)
            offset += high - low
        return found

    def _ranges(self, step: int) -> list[tuple[int, int]]:
        """Return the ranges of the shuffled line that a training step reads, one per lane."""
        return [split_range(start, stop, step, self.num_steps) for start, stop in self._lanes]

    def _pieces_between(self, start: int, stop: int) -> list[Piece]:
        """Cut the range [start, stop) of the shuffled line at the borders of rows, into pieces."""
        first, last = np.searchsorted(self._edges, [start, stop - 1], side="right") - 1
        found = []
        for i in range(first, last + 1):
            edge = int(self._edges[i])
            end = int(self._edges[i + 1])
            group = int(self._groups[i])
            row = int(self._rows[i])
            found.append(Piece(group, row, max(start, edge) - edge, min(stop, end) - edge))
        return found


def split_range(start: int, stop: int, index: int, count: int) -> tuple[int, int]:
    """Return part `index` of `count` nearly equal parts of the range [start, stop), as a range."""
    length = stop - start
    return start + length * index // count, start + length * (index + 1) // count


class Batch(NamedTuple):
    """A training batch of cached hidden states, next tokens and labels.

    Next tokens are those at t+1 of each position t; labels are those at t+2+k for head k, or -100.
    Both are int64. With soft labels, `teacher_MD` holds the hidden states from which the target
    predicted the labels, and `teacher_KN` holds the row of `teacher_MD` for each label, or -1.
    `rows` are the rows of these positions, for heads with `row_layers`.
    """

    hidden_ND: Tensor
    next_N: Tensor
    labels_KN: Tensor
    teacher_MD: Tensor
    teacher_KN: Tensor
    rows: Rows | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return this batch with a function applied to each tensor, the rows' tensors included."""
        rows = self.rows
        if rows is not None:
            rows = Rows(*map(change, rows))
        return Batch._make([*map(change, self[:5]), rows])


class BatchPlan(Protocol):
    """Plan of an epoch: what each worker reads in each step."""

    def pieces(self, step: int, workers: Workers) -> list[Piece]:
        """Return the ranges of cached rows that one worker reads in a training step."""


def load_batches(
    rows: FeatureRows,
    plan: BatchPlan,
    steps: Sequence[int],
    workers: Workers = ALONE,
    device: torch.device = CPU,
    *,
    soft_labels: bool = False,
) -> Iterator[Batch]:
    """Yield one worker's training batch for each of `steps`, in order, on `device`.

    Row groups are read ahead in threads. Without soft labels, the teacher tensors are empty.

    Raises:
        DamagedShard: A page fails its checksum, or a shard is gone.
        DataError: A shard belongs to another run.
    """
    is_gpu = device.type == "cuda"
    ahead: deque[list[Piece]] = deque()
    groups: dict[int, Future[list[FeatureRow]]] = {}  # open, or being read
    waiting: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(NUM_READERS) as readers, ThreadPoolExecutor(1) as assembler:
        try:
            for number in range(len(steps) + STEPS_AHEAD + BATCHES_AHEAD):
                if number < len(steps):
                    pieces = plan.pieces(steps[number], workers)
                    ahead.append(pieces)
                    for piece in pieces:
                        if piece.group not in groups:
                            groups[piece.group] = readers.submit(rows.read_group, piece.group)
                if number >= STEPS_AHEAD and ahead:
                    needed = {piece.group for pieces in ahead for piece in pieces}
                    groups = {group: groups[group] for group in needed}
                    arguments = (rows, ahead.popleft(), groups.copy(), soft_labels, is_gpu)
                    waiting.append(assembler.submit(_assemble_batch, *arguments))
                if number >= STEPS_AHEAD + BATCHES_AHEAD:
                    move = partial(Tensor.to, device=device, non_blocking=True)
                    yield waiting.popleft().result().map(move)
        finally:  # also when the loop stops early: read nothing more
            assembler.shutdown(wait=False, cancel_futures=True)
            readers.shutdown(wait=False, cancel_futures=True)


def _assemble_batch(
    rows: FeatureRows,
    pieces: Sequence[Piece],
    groups: Mapping[int, Future[list[FeatureRow]]],
    soft_labels: bool,
    pin: bool,
) -> Batch:
    """Copy the cached positions of `pieces` into one training batch, in pinned memory if `pin`.

    Waits until the row groups of the pieces are read.
    """
    num_positions = sum(len(piece) for piece in pieces)
    hidden_ND = torch.empty(num_positions, rows.states.hidden_size, dtype=rows.states.dtype)
    next_N = torch.empty(num_positions, dtype=torch.int64)
    labels_KN = torch.empty(rows.num_heads, num_positions, dtype=torch.int64)
    states = [hidden_ND[:0]]
    rows_of_labels = [np.empty((rows.num_heads, 0), np.int64)]
    whole_rows = []
    if rows.row_states is not None:
        none = torch.empty(0, dtype=torch.int64)
        states_0X = torch.empty(0, rows.row_states.size, dtype=rows.row_states.dtype)
        whole_rows.append(Rows(states_0X, none, none, none))
    start = 0
    num_states = 0
    for piece in pieces:
        row = groups[piece.group].result()[piece.row]
        stop = start + len(piece)
        chosen = row.learnable[piece.start : piece.stop]
        torch.index_select(row.hidden_ND, 0, chosen, out=hidden_ND[start:stop])
        next_N[start:stop] = torch.from_numpy(row.next_N[piece.start : piece.stop])
        labels_KN[:, start:stop] = torch.from_numpy(row.labels_KN[:, piece.start : piece.stop])
        start = stop
        if rows.row_states is not None:
            whole_rows.append(row.whole_row())
        if soft_labels:
            states_MD, rows_KN = row.soft_label_states(piece.start, piece.stop)
            states.append(states_MD)
            rows_of_labels.append(np.where(rows_KN < 0, -1, rows_KN + num_states))
            num_states += len(states_MD)
    teacher_KN = torch.from_numpy(np.concatenate(rows_of_labels, 1))
    packed = Rows.pack(whole_rows) if whole_rows else None
    batch = Batch(hidden_ND, next_N, labels_KN, torch.cat(states), teacher_KN, packed)
    return batch.map(Tensor.pin_memory) if pin else batch
