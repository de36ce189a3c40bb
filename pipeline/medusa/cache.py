"""A preallocated KV cache that a tree is written into and that keeps the accepted path alone.

Keys and values of all layers lie in one tensor (one per shape, dtype and device), so that keeping a path moves the
entries of every layer at once, in place. Layers keep the full length whatever their attention, since the window is in
the mask (see masks.py), and hand out only the filled part, so that a step costs what its sequence costs, not the
capacity.

Letters: L key and value tensors of the layers, B batch, H key-value heads, S slots, D head size.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

_GRANULE = 256  # slots; sequences of similar length then share one allocation


class _TreeCacheLayer(CacheLayerMixin):
    """One layer's window on the cache: before there is room, it holds the prompt's states as they come."""

    def __init__(self, cache: TreeCache):
        super().__init__()
        self.cache = cache
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Room is made by the cache, for all layers together."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        start, num_rows = self.cache.length, key_states.shape[2]
        if self.cache.num_slots == 0:
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        assert self.keys is not None and self.values is not None
        self.keys.narrow(2, start, num_rows).copy_(key_states)
        self.values.narrow(2, start, num_rows).copy_(value_states)
        return self.keys.narrow(2, 0, start + num_rows), self.values.narrow(2, 0, start + num_rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return -1


def num_cached_layers(config: PretrainedConfig) -> int:
    """How many layers keep keys and values of their own (some models share them between layers)."""
    return len(get_layer_types_and_kwargs(config)[0])


class TreeCache(Cache):
    """The KV cache of one sequence: `begin` a prompt, let a forward write its rows, `keep` those that were accepted."""

    def __init__(self, num_layers: int):
        super().__init__(layers=[_TreeCacheLayer(self) for _ in range(num_layers)])
        self.length = 0
        self.num_slots = 0
        self._wanted_slots = 0
        self._stores: list[Tensor] = []  # each [L, B, H, S, D]

    def begin(self, num_slots: int) -> None:
        """Forgets the last sequence; the next one and its widest tree will need `num_slots`."""
        self.length = 0
        self._wanted_slots = num_slots
        if num_slots > self.num_slots:
            self.num_slots, self._stores = 0, []
            for layer in self.layers:
                layer.keys = layer.values = None

    def keep_prompt(self, num_tokens: int) -> None:
        """Keeps the first forward's rows, all of them, and makes room for what follows."""
        self.length = num_tokens
        if self.num_slots == 0:
            self._allocate()

    def keep(self, rows: list[int], rows_T: Tensor) -> None:
        """Keeps these rows of the last forward, in this order: the root and the accepted nodes below it, ascending.

        `rows` and `rows_T` (which may be longer) name the same rows, on the host and on the device, so that nothing
        is copied between them.
        """
        num_in_place = next((i for i, row in enumerate(rows) if row != i), len(rows))
        num_moved = len(rows) - num_in_place
        if num_moved:
            slots_T = rows_T[num_in_place : len(rows)] + self.length
            for store in self._stores:
                moved = store.index_select(3, slots_T.to(store.device))
                store.narrow(3, self.length + num_in_place, num_moved).copy_(moved)
        self.length += len(rows)

    def _allocate(self) -> None:
        """One store per kind of tensor, the prompt's states moved in, and every layer given its part."""
        self.num_slots = -(-self._wanted_slots // _GRANULE) * _GRANULE
        kinds = defaultdict(list)
        for layer in self.layers:
            for name in ("keys", "values"):
                states = getattr(layer, name)
                batch, num_heads, _, size = states.shape
                kinds[batch, num_heads, size, states.dtype, states.device].append((layer, name))
        for (batch, num_heads, size, dtype, device), members in kinds.items():
            shape = (len(members), batch, num_heads, self.num_slots, size)
            store = torch.empty(shape, dtype=dtype, device=device)
            for part, (layer, name) in zip(store, members, strict=True):
                part.narrow(2, 0, self.length).copy_(getattr(layer, name))
                setattr(layer, name, part)
            self._stores.append(store)
