"""Count the memory that a program needs on each device, at any size, without allocating it.

    with fake_cuda(directory), Ledger() as ledger:
        training_step()
    gib = ledger.peak["cuda:0"] / 2**30

counts the storages that are alive at the worst moment, to the byte. A real allocator adds what it
rounds up and what lies idle in its pools (some percent), CUDA its context (about half a GiB) and
libraries their workspaces.
"""

from __future__ import annotations

import weakref
from collections import Counter

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Ledger(TorchDispatchMode):
    """Storages alive by device, in bytes: `live` now, `peak` at most; those of `held` tensors from
    the start.
    """

    def __init__(self, held=()):
        super().__init__()
        self.live = Counter()
        self.peak = Counter()
        self._storages = {}
        for tensor in held:
            self._enter(tensor)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._enter(leaf, counts=False)  # it was there before, and is not held
        made = operator(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._enter(leaf)
        return made

    def _enter(self, tensor, counts=True):
        storage, device = tensor.untyped_storage(), str(tensor.device)
        key = storage._cdata
        if key in self._storages:
            return
        num_bytes = storage.nbytes() if counts else 0

        def leave(_):
            del self._storages[key]
            self.live[device] -= num_bytes

        self._storages[key] = weakref.ref(storage, leave)
        self.live[device] += num_bytes
        self.peak[device] = max(self.peak[device], self.live[device])
