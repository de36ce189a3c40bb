"""Key/value cache of draft heads that attend to the text.

The cache holds a key and a value for each position of a text that the target has computed. The keys
of drafted tokens are never stored here, because they belong to one path of one tree. A forward pass
may write padding behind a text's length; the next one overwrites it. Shapes are fixed and lengths
stay on the device, so that a decoding step can be captured as a CUDA graph.

Letters: B texts, G key-value heads, S slots, E head size, T rows of a forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class DraftCache(NamedTuple):
    """Keys and values of several texts, and the number of positions that each text holds."""

    keys_BGSE: Tensor
    values_BGSE: Tensor
    length_B: Tensor

    @classmethod
    def empty(cls, sizes: tuple[int, int, int, int], like: Tensor) -> DraftCache:
        """Allocate a cache of sizes (B, G, S, E), in the dtype and on the device of a tensor."""
        length_B = torch.zeros(sizes[0], dtype=torch.int64, device=like.device)
        # Zeros, because a masked slot must hold finite values.
        return cls(like.new_zeros(sizes), like.new_zeros(sizes), length_B)

    def texts(self, start: int, count: int) -> DraftCache:
        """Return views of `count` texts from the batch index `start` on."""
        return DraftCache(*(tensor.narrow(0, start, count) for tensor in self))

    def keep(self, kept: Sequence[int]) -> None:
        """Move the texts at the ascending batch indices `kept` to the front, in place."""
        for tensor in self:
            for place, old in enumerate(kept):
                if place != old:
                    tensor[place].copy_(tensor[old])

    def write(self, keys_BTGE: Tensor, values_BTGE: Tensor) -> None:
        """Write the keys and values of T rows behind each text's length, which stays the same."""
        num_texts, num_rows = keys_BTGE.shape[:2]
        row_T = torch.arange(num_rows, device=self.length_B.device)
        slot_BT = self.length_B[:, None] + row_T
        text_B1 = torch.arange(num_texts, device=self.length_B.device)[:, None]
        self.keys_BGSE[text_B1, :, slot_BT] = keys_BTGE
        self.values_BGSE[text_B1, :, slot_BT] = values_BTGE
