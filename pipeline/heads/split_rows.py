"""What a loss asks of heads that are split over several workers, of which each holds some rows of every matrix.

Letters: V rows of a matrix, R of them on each worker, D columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor


class SplitRows(Protocol):
    """How the rows of a parameter, its last dimension but one, are split over workers; each calls alike."""

    num_rows: int

    def whole(self, part: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """All rows [..., V, D], of this worker's part [..., R, D] and the others', in a dtype."""

    def summed(self, blocks: Iterable[Tensor], out: Tensor, place: int = 0) -> Tensor | None:
        """This worker's part of a sum over all workers, to `out` [R, D]; of blocks of its V rows, in order.

        A block is summed while the next one is made, and what it held is lost. None while micro-batches accumulate,
        each `place` for itself.
        """
