"""The workers of one training run: which one this is, and sums over all. One alone needs no process group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """Worker `rank` of `size`; with more than one, torch.distributed is initialised already."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Until every worker has come here."""
        if self.size > 1:
            dist.barrier()

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all workers, in place; bitwise the same on each."""
        self.sum_all([tensor])
        return tensor

    def sum_all(self, tensors: Iterable[Tensor]) -> None:
        """Sum each tensor over all workers, in place, all in flight at once.

        The heads' parameters are stacked, so their gradients are few and large; LoRA's are small, and many.
        """
        if self.size > 1:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()
