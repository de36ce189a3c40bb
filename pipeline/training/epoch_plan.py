"""Which cached positions each step of an epoch reads, by arithmetic.

Heads read one state each, so a batch is a set of *positions*, not of rows: rows are cut wherever a
batch ends, and a row longer than the budget needs no rule of its own. The epoch's row groups are
shuffled, and the rows within each; laid end to end they form a line of positions, cut into `LANES`
equal lanes. Step s takes the s-th equal part of every lane. So every position is read once per
epoch; batches have one size (give or take one position per lane); each mixes rows of `LANES` row
groups from all over the data; no more row groups than that are open at once; any (epoch, step) is
reached by arithmetic. Workers cut a batch into contiguous shares: the batch is the same for any
number of them, their shares are equal, and a row group is read by one worker, not by all. Limits:
shuffling between row groups is as fine as they are small; a group that two lanes share is read
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LANES = 16

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

    def __init__(
        self,
        lengths: Lengths,
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
        self._edges = np.cumsum(
            np.concatenate([[0], *sizes])
        )  # row i of the line is [edges[i], edges[i+1])
        self.num_positions = min(int(self._edges[-1]), limit or int(self._edges[-1]))
        self.num_steps = -(-self.num_positions // batch_tokens)
        # Fewer lanes where positions are so few that a lane could not give one to every step.
        num_lanes = min(LANES, self.num_positions // max(1, self.num_steps))
        self._lanes = [part(0, self.num_positions, lane, num_lanes) for lane in range(num_lanes)]

    def pieces(self, step: int, rank: int = 0, world_size: int = 1) -> list[Piece]:
        """What one worker reads in one step, in the line's order; its share may be empty when
        positions are few.

        Raises:
            ValueError: The epoch has no such step.
        """
        ranges, share = self._share(step, rank, world_size)
        return [
            piece for start, stop in _within(ranges, *share) for piece in self._between(start, stop)
        ]

    def first(self, step: int, rank: int = 0, world_size: int = 1) -> int:
        """The place of a worker's first position among all of the step."""
        return self._share(step, rank, world_size)[1][0]

    def _share(
        self, step: int, rank: int, world_size: int
    ) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """The ranges of the line that a step reads, and the worker's range of these laid end to
        end.
        """
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
