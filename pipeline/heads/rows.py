"""Whole rows of text, packed, as training and calibration give them to heads that attend to a row.

Letters: S positions of all rows, N positions with labels, T tokens of a text, X size of what the
heads read at a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SPAN = 4  # positions of several rows in a block of attention, over its labels


class Rows(NamedTuple):
    """Rows without padding, for kinds of heads with `HeadsShape.row_layers`.

    A row ends at its last position with a label.

    Attributes:
        states_SX: The outputs of the layers `HeadsShape.row_layers` side by side.
        tokens_S: The token after each position, int64.
        start_S: The place of the first position of each position's row, int64.
        learned_N: The places of the N positions with labels, ascending, int64.
    """

    states_SX: Tensor
    tokens_S: Tensor
    start_S: Tensor
    learned_N: Tensor

    @classmethod
    def of_text(cls, states_TX: Tensor, ids_T: Tensor, learned_N: Tensor) -> Rows:
        """Return one row, up to its last position with a label.

        Args:
            states_TX: The outputs of the layers at the positions of a text.
            ids_T: The text's tokens, int64.
            learned_N: The positions with labels, ascending, int64.
        """
        num_read = int(learned_N[-1]) + 1
        start_S = torch.zeros_like(ids_T[:num_read])
        return cls(states_TX[:num_read], ids_T[1 : num_read + 1], start_S, learned_N)

    def to(self, device: torch.device) -> Rows:
        """Copy the rows to a device."""
        return Rows(*(tensor.to(device) for tensor in self))

    @classmethod
    def pack(cls, parts: Sequence[Rows]) -> Rows:
        """Concatenate rows; a part may have several or none."""
        starts = []
        learned = []
        num_before = 0
        for part in parts:
            starts.append(part.start_S + num_before)
            learned.append(part.learned_N + num_before)
            num_before += len(part.start_S)
        states_SX = torch.cat([part.states_SX for part in parts])
        tokens_S = torch.cat([part.tokens_S for part in parts])
        return cls(states_SX, tokens_S, torch.cat(starts), torch.cat(learned))

    def blocks(self, size: int) -> list[tuple[int, slice]]:
        """Return blocks of positions with labels: how many, and the positions that they attend to.

        A block has at most `size` labels. It is a part of one row, or several rows of together at
        most `SPAN * size` positions, since each of its labels is compared with all of them.
        """
        learned = self.learned_N.tolist()
        starts, counts = self.start_S[self.learned_N].unique_consecutive(return_counts=True)
        blocks: list[tuple[int, slice]] = []
        place = 0
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            number, keys = blocks[-1] if blocks else (size, slice(0, 0))
            end = learned[place + count - 1] + 1
            if number + count <= size and end - keys.start <= SPAN * size:
                blocks[-1] = (number + count, slice(keys.start, end))
            else:
                for first in range(place, place + count, size):
                    stop = min(first + size, place + count)
                    blocks.append((stop - first, slice(start, learned[stop - 1] + 1)))
            place += count
        return blocks
