"""Training batches of whole rows: the plan of an epoch, for kinds of heads with `row_layers`.

Such heads attend to a row's earlier positions, so a row is never split between batches or workers.
The epoch's row groups are shuffled, and the rows of about `GROUPS` successive groups together.
Placed end to end, the rows form a line of positions with labels. It is cut into steps, and each
step into the shares of the workers, at the borders of rows that are nearest to equal parts. So:

- every row is read once per epoch;
- a batch differs from the average by less than its longest rows; every step has a row, but a worker
  may have none;
- each batch mixes rows of about `GROUPS` row groups, and few more row groups are in memory at once;
  a step's rows are sorted by row group, so that each of several workers reads few groups;
- the rows of any (epoch, step) are computed directly, without reading the steps before;
- a batch is the same for any number of workers.

`load_batches` loads the batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipeline.training.feature_batches import Piece
from pipeline.training.task import ALONE, Workers

GROUPS = 8


class RowPlan:
    """Plan of one training epoch: the whole rows that each step reads.

    Args:
        lengths: Per row group, the number of positions with labels of each of its rows; 0 leaves a
            row out.
        batch_tokens: The average number of positions with labels per step over all workers. Steps
            have more if there would be more steps than rows.
        seed: Seed of the shuffle.
        epoch: The epoch's number; each epoch has its own order.
        limit: Plan only the first rows of the shuffled line that have `limit` positions.
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
        self._rows = _shuffled_rows(lengths, np.random.default_rng([seed, epoch]))
        self._lengths = np.array([lengths[group][row] for group, row in self._rows], np.int64)
        if limit is not None:
            num_rows = int(np.searchsorted(self._lengths.cumsum(), limit)) + 1
            self._rows = self._rows[:num_rows]
            self._lengths = self._lengths[:num_rows]
        num_positions = int(self._lengths.sum())
        self.num_steps = min(-(-num_positions // batch_tokens), len(self._rows))
        # Every step has at least one row, and leaves one to each step after it.
        step = np.arange(self.num_steps + 1)
        cuts = np.maximum.accumulate(_equal_cuts(self._lengths, self.num_steps) - step) + step
        self._steps = np.minimum(cuts, len(self._rows) - self.num_steps + step)
        step_of_row = np.repeat(step[:-1], np.diff(self._steps))
        by_group = np.lexsort((self._rows[:, 0], step_of_row))
        self._rows = self._rows[by_group]
        self._lengths = self._lengths[by_group]

    def share(self, step: int, workers: Workers) -> tuple[int, int]:
        """Return the range [start, stop) of a training step's rows that one worker reads."""
        start, stop = self._steps[step : step + 2]
        cuts = _equal_cuts(self._lengths[start:stop], workers.world_size)
        return int(cuts[workers.rank]), int(cuts[workers.rank + 1])

    def pieces(self, step: int, workers: Workers = ALONE) -> list[Piece]:
        """Return the rows, each a whole piece, that one worker reads in a training step."""
        first, last = self._steps[step] + self.share(step, workers)
        found = []
        for (group, row), length in zip(
            self._rows[first:last].tolist(), self._lengths[first:last].tolist(), strict=True
        ):
            found.append(Piece(group, row, 0, length))
        return found


def _shuffled_rows(
    lengths: Sequence[npt.NDArray[np.int64]], random: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Return the rows with labels in shuffled order, as pairs of row group and row."""
    order = random.permutation(len(lengths))
    none = np.empty((0, 2), np.int64)
    shuffled = [none]
    for groups in np.array_split(order, -(-len(order) // GROUPS) or 1):
        rows = [none]
        for group in groups:
            used = np.flatnonzero(lengths[group])
            rows.append(np.stack((np.full_like(used, group), used), 1))
        shuffled.append(random.permutation(np.concatenate(rows)))
    return np.concatenate(shuffled)


def _equal_cuts(lengths: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Return the `count` + 1 rows at which rows are cut into `count` nearly equal parts.

    Row i belongs to the part that holds the middle of its positions. A part may be empty.
    """
    ends = lengths.cumsum()
    middles = 2 * ends - lengths  # twice
    parts = 2 * lengths.sum() * np.arange(count + 1)
    return np.searchsorted(middles * count, parts)
