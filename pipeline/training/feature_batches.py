"""Batches of cached states: their loading ahead of use.

A batch is flat: rows end to end, no padding; which positions it holds, an `EpochPlan` says. Row
groups are read by a small pool of threads in the order in which the plan needs them and dropped
after their last use; one more thread assembles batches (in pinned memory for a GPU, and copied
there on a stream of its own), so that training waits only when reading is slower than computing.

Letters: N positions, D hidden size, K heads, M states that predict labels.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from pipeline.artifacts.feature_rows import FeatureRows, RowGroup
from pipeline.training.epoch_plan import EpochPlan, Piece

NUM_READERS = min(8, max(1, len(os.sched_getaffinity(0)) // 2))  # the other cores compute
BATCHES_AHEAD = 2  # assembled batches that wait for the loop
STEPS_AHEAD = 4  # steps whose row groups are being read already


@dataclass(frozen=True)
class Batch:
    """Hidden states in their stored dtype, the tokens that follow, and labels, -100 where a head
    has nothing to learn.

    Tokens are int64. Where soft labels are asked for, `teacher_MD` holds the states that the target
    predicted the labels from, and `teacher_KN` the row of each label's, -1 where there is none.
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
    """A batch's `teacher_MD` and `teacher_KN`: the states of its pieces, and of up to K positions
    behind each.
    """
    found = [groups[piece.group][piece.row].teachers(piece.start, piece.stop) for piece in pieces]
    teacher_MD = torch.empty(
        sum(len(states) for states, _ in found), rows.hidden_size, dtype=rows.dtype, pin_memory=pin
    )
    teacher_KN = torch.empty(
        rows.num_heads, sum(map(len, pieces)), dtype=torch.int64, pin_memory=pin
    )
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
    """One worker's batches of the plan's `steps`, in order, on `device`; with the target's states
    for soft labels.

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
        """Each step's pieces with the row groups that hold them; those of the next steps are
        already being read.
        """
        ahead: deque[list[Piece]] = deque()
        for step in steps:
            ahead.append(self._plan.pieces(step, self._rank, self._world_size))
            for piece in ahead[-1]:
                if piece.group not in self._groups:
                    self._groups[piece.group] = self._readers.submit(
                        self._rows.read_group, piece.group
                    )
            if len(ahead) > STEPS_AHEAD:
                yield self._next(ahead)
        while ahead:
            yield self._next(ahead)

    def _next(self, ahead: deque[list[Piece]]) -> dict[Piece, Future[RowGroup]]:
        """Take the first step; forget the groups that no step in sight needs."""
        pieces = ahead.popleft()
        found = {piece: self._groups[piece.group] for piece in pieces}
        needed = {piece.group for step in ahead for piece in step}
        self._groups = {
            group: reading for group, reading in self._groups.items() if group in needed
        }
        return found

    def batch(
        self,
        pieces: dict[Piece, Future[RowGroup]],
        device: torch.device | None,
        stream: torch.cuda.Stream | None,
    ) -> tuple[Batch, torch.cuda.Event | None]:
        """Wait for the row groups and put the batch together, on the device if it is a GPU."""
        groups = {piece.group: reading.result() for piece, reading in pieces.items()}
        pin = stream is not None
        batch = assemble(self._rows, list(pieces), groups, soft_labels=self._soft_labels, pin=pin)
        if stream is None:
            return batch, None
        with torch.cuda.stream(stream):
            moved = {
                name: tensor.to(device, non_blocking=True)
                for name, tensor in batch.tensors().items()
            }
            return Batch(**moved), stream.record_event()


def _ready(batch: Batch, copied: torch.cuda.Event | None) -> Batch:
    """The batch, safe to use on the current stream: a GPU copy is awaited there, not on the CPU."""
    if copied is not None:
        stream = torch.cuda.current_stream(batch.hidden_ND.device)
        stream.wait_event(copied)
        for tensor in batch.tensors().values():
            tensor.record_stream(stream)
    return batch
