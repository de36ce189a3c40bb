"""How many bytes of tensors live at once: every storage that an operation makes, until it is freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorage(TorchDispatchMode):
    """Within this context `peak` is the largest number of bytes alive at once, `held` included from the start."""

    def __init__(self, held: Iterable[Tensor] = ()):
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, weakref.ref] = {}
        self.hold(held)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count these too, as long as somebody else keeps them."""
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def freed(_: object) -> None:
            self.now -= size
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)
