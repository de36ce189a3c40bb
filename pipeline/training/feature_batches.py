"""Batches of cached states: which positions each step reads, and their loading ahead of use.

Heads read one state each, so a batch is a set of *positions*, not of rows: rows are cut wherever a batch ends, and a
row longer than the budget needs no rule of its own. The epoch's row groups are shuffled, and the rows within each; laid
end to end they form a line of positions, cut into `LANES` equal lanes. Step s takes the s-th equal part of every lane.
So every position is read once per epoch; batches have one size (give or take one position per lane); each mixes rows of
`LANES` row groups from all over the data; no more row groups than that are open at once; any (epoch, step) is reached
by arithmetic. Workers cut a batch into contiguous shares: the batch is the same for any number of them, their shares
are equal, and a row group is read by one worker, not by all. Limits: shuffling between row groups is as fine as they
are small; a group that two lanes share is read twice.

A batch is flat: rows end to end, no padding. Row groups are read by a small pool of threads in the order in which the
plan needs them and dropped after their last use; one more thread assembles batches (in pinned memory for a GPU, and
copied there on a stream of its own), so that training waits only when reading is slower than computing.

Letters: N positions, D hidden size, K heads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.artifacts.feature_rows import FeatureRows, RowGroup

LANES = 16
NUM_READERS = min(8, max(1, len(os.sched_getaffinity(0)) // 2))  # the other cores compute
BATCHES_AHEAD = 2  # assembled batches that wait for the loop
STEPS_AHEAD = 4  # steps whose row groups are being read already

Lengths = Sequence[npt.NDArray[np.int64]]


@dataclass(frozen=True)
class Piece:
    """The positions [start, stop) of one row of one row group."""

    group: int
    row: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class EpochPlan:
    """The steps of one epoch.

    Args:
        lengths: Per row group, the number of positions of each of its rows; 0 leaves a row out.
        batch_tokens: Positions per step, over all workers, at most (give or take one per lane).
        seed: Seed of the shuffle.
        epoch: Each epoch has an order of its own.
        limit: Plan only this many positions, the first of the shuffled line.
    """

    def __init__(self, lengths: Lengths, *, batch_tokens: int, seed: int, epoch: int = 0, limit: int | None = None):
        random = np.random.default_rng([seed, epoch])
        groups = random.permutation(len(lengths))
        rows = [random.permutation(np.flatnonzero(lengths[group])) for group in groups]
        sizes = [lengths[group][order] for group, order in zip(groups, rows, strict=True)]
        self._groups = np.repeat(groups, [len(order) for order in rows])
        self._rows = np.concatenate([*rows, np.empty(0, np.int64)])
        self._edges = np.cumsum(np.concatenate([[0], *sizes]))  # row i of the line is [edges[i], edges[i+1])
        self.num_positions = min(int(self._edges[-1]), limit or int(self._edges[-1]))
        self.num_steps = -(-self.num_positions // batch_tokens)
        # Fewer lanes where positions are so few that a lane could not give one to every step.
        num_lanes = min(LANES, self.num_positions // max(1, self.num_steps))
        self._lanes = [part(0, self.num_positions, lane, num_lanes) for lane in range(num_lanes)]

    def pieces(self, step: int, rank: int = 0, world_size: int = 1) -> list[Piece]:
        """What one worker reads in one step, in the line's order; its share may be empty when positions are few.

        Raises:
            ValueError: The epoch has no such step.
        """
        ranges, share = self._share(step, rank, world_size)
        return [piece for start, stop in _within(ranges, *share) for piece in self._between(start, stop)]

    def first(self, step: int, rank: int = 0, world_size: int = 1) -> int:
        """The place of a worker's first position among all of the step."""
        return self._share(step, rank, world_size)[1][0]

    def _share(self, step: int, rank: int, world_size: int) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """The ranges of the line that a step reads, and the worker's range of these laid end to end."""
        if not 0 <= step < self.num_steps:
            raise ValueError(f"step {step} of {self.num_steps}")
        ranges = [part(start, stop, step, self.num_steps) for start, stop in self._lanes]
        return ranges, part(0, sum(stop - start for start, stop in ranges), rank, world_size)

    def _between(self, start: int, stop: int) -> list[Piece]:
        """The rows, or parts of rows, that the range [start, stop) of the line covers."""
        first, last = np.searchsorted(self._edges, [start, stop - 1], side="right") - 1
        found = []
        for i in range(first, last + 1):
            edge, end = int(self._edges[i]), int(self._edges[i + 1])
            group, row = int(self._groups[i]), int(self._rows[i])
            found.append(Piece(group, row, max(start, edge) - edge, min(stop, end) - edge))
        return found


def part(start: int, stop: int, index: int, count: int) -> tuple[int, int]:
    """The index-th of `count` parts of a range, equal give or take one."""
    length = stop - start
    return start + length * index // count, start + length * (index + 1) // count


def _within(ranges: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """The part [start, stop) of ranges laid end to end, as non-empty ranges."""
    found, offset = [], 0
    for low, high in ranges:
        first, last = max(start - offset, 0), min(stop - offset, high - low)
        if first < last:
            found.append((low + first, low + last))
        offset += high - low
    return found


@dataclass(frozen=True)
class Batch:
    """Hidden states in their stored dtype, the tokens that follow, and labels, -100 where a head has nothing to learn.

    Tokens are int64. Where soft labels are asked for, `teacher_MD` holds the states that the target predicted the
    labels from, and `teacher_KN` the row of each label's, -1 where there is none.
    """

    hidden_ND: Tensor
    next_N: Tensor
    labels_KN: Tensor
    teacher_MD: Tensor | None = None
    teacher_KN: Tensor | None = None

    def __len__(self) -> int:
        return len(self.hidden_ND)

    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by field."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def assemble(
    rows: FeatureRows,
    pieces: Sequence[Piece],
    groups: dict[int, RowGroup],
    *,
    soft_labels: bool = False,
    pin: bool = False,
) -> Batch:
    """The positions of `pieces`, copied into one batch."""
    num_positions = sum(map(len, pieces))
    hidden_ND = torch.empty(num_positions, rows.hidden_size, dtype=rows.dtype, pin_memory=pin)
    next_N = torch.empty(num_positions, dtype=torch.int64, pin_memory=pin)
    labels_KN = torch.empty(rows.num_heads, num_positions, dtype=torch.int64, pin_memory=pin)
    start = 0
    for piece in pieces:
        row, stop = groups[piece.group][piece.row], start + len(piece)
        chosen = row.learnable[piece.start : piece.stop]
        torch.index_select(row.hidden_ND, 0, chosen, out=hidden_ND[start:stop])
        next_N[start:stop] = torch.from_numpy(row.next_N[piece.start : piece.stop])
        labels_KN[:, start:stop] = torch.from_numpy(row.labels_KN[:, piece.start : piece.stop])
        start = stop
    if not soft_labels:
        return Batch(hidden_ND, next_N, labels_KN)
    return Batch(hidden_ND, next_N, labels_KN, *_teachers(rows, pieces, groups, pin))


def _teachers(
    rows: FeatureRows, pieces: Sequence[Piece], groups: dict[int, RowGroup], pin: bool
) -> tuple[Tensor, Tensor]:
    """A batch's `teacher_MD` and `teacher_KN`: the states of its pieces, and of up to K positions behind each."""
    found = [groups[piece.group][piece.row].teachers(piece.start, piece.stop) for piece in pieces]
    teacher_MD = torch.empty(
        sum(len(states) for states, _ in found), rows.hidden_size, dtype=rows.dtype, pin_memory=pin
    )
    teacher_KN = torch.empty(rows.num_heads, sum(map(len, pieces)), dtype=torch.int64, pin_memory=pin)
    first, start = 0, 0
    for states_MD, rows_KN in found:
        stop = start + rows_KN.shape[1]
        teacher_MD[first : first + len(states_MD)] = states_MD
        teacher_KN[:, start:stop] = torch.from_numpy(np.where(rows_KN < 0, -1, rows_KN + first))
        first, start = first + len(states_MD), stop
    return teacher_MD, teacher_KN


def load_batches(
    rows: FeatureRows,
    plan: EpochPlan,
    steps: Iterable[int],
    *,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | None = None,
    soft_labels: bool = False,
) -> Iterator[Batch]:
    """One worker's batches of the plan's `steps`, in order, on `device`; with the target's states for soft labels.

    Raises:
        DataError: A page fails its checksum, or a row does not belong to this target.
    """
    cuda = device is not None and device.type == "cuda"
    stream = torch.cuda.Stream(device) if cuda else None
    with ThreadPoolExecutor(NUM_READERS) as readers, ThreadPoolExecutor(1) as assembler:
        source = _Source(rows, plan, rank, world_size, readers, soft_labels)
        waiting: deque[Future[tuple[Batch, torch.cuda.Event | None]]] = deque()
        try:
            for pieces in source.walk(steps):
                waiting.append(assembler.submit(source.batch, pieces, device, stream))
                if len(waiting) > BATCHES_AHEAD:
                    yield _ready(*waiting.popleft().result())
            while waiting:
                yield _ready(*waiting.popleft().result())
        finally:  # also when the loop stops early: read nothing more
            assembler.shutdown(wait=False, cancel_futures=True)
            readers.shutdown(wait=False, cancel_futures=True)


class _Source:
    """Row groups that are open or being read, and batches made of them."""

    def __init__(
        self,
        rows: FeatureRows,
        plan: EpochPlan,
        rank: int,
        world_size: int,
        readers: ThreadPoolExecutor,
        soft_labels: bool,
    ):
        self._rows, self._plan, self._rank, self._world_size = rows, plan, rank, world_size
        self._readers, self._soft_labels = readers, soft_labels
        self._groups: dict[int, Future[RowGroup]] = {}

    def walk(self, steps: Iterable[int]) -> Iterator[dict[Piece, Future[RowGroup]]]:
        """Each step's pieces with the row groups that hold them; those of the next steps are already being read."""
        ahead: deque[list[Piece]] = deque()
        for step in steps:
            ahead.append(self._plan.pieces(step, self._rank, self._world_size))
            for piece in ahead[-1]:
                if piece.group not in self._groups:
                    self._groups[piece.group] = self._readers.submit(self._rows.read_group, piece.group)
            if len(ahead) > STEPS_AHEAD:
                yield self._next(ahead)
        while ahead:
            yield self._next(ahead)

    def _next(self, ahead: deque[list[Piece]]) -> dict[Piece, Future[RowGroup]]:
        """Take the first step; forget the groups that no step in sight needs."""
        pieces = ahead.popleft()
        found = {piece: self._groups[piece.group] for piece in pieces}
        needed = {piece.group for step in ahead for piece in step}
        self._groups = {group: reading for group, reading in self._groups.items() if group in needed}
        return found

    def batch(
        self, pieces: dict[Piece, Future[RowGroup]], device: torch.device | None, stream: torch.cuda.Stream | None
    ) -> tuple[Batch, torch.cuda.Event | None]:
        """Wait for the row groups and put the batch together, on the device if it is a GPU."""
        groups = {piece.group: reading.result() for piece, reading in pieces.items()}
        pin = stream is not None
        batch = assemble(self._rows, list(pieces), groups, soft_labels=self._soft_labels, pin=pin)
        if stream is None:
            return batch, None
        with torch.cuda.stream(stream):
            moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.tensors().items()}
            return Batch(**moved), stream.record_event()


def _ready(batch: Batch, copied: torch.cuda.Event | None) -> Batch:
    """The batch, safe to use on the current stream: a GPU copy is awaited there, not on the CPU."""
    if copied is not None:
        stream = torch.cuda.current_stream(batch.hidden_ND.device)
        stream.wait_event(copied)
        for tensor in batch.tensors().values():
            tensor.record_stream(stream)
    return batch
