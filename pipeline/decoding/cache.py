"""Preallocated KV cache that stores a candidate tree and keeps its accepted path.

Keys and values of all layers are views of one tensor (per shape, dtype and device), so the entries
of an accepted path move in all layers at once, in place. Each sequence of a batch has its own
length and batch index ("place"). Sliding-window layers also keep all tokens, because windows are
part of the mask (see masks.py). A layer returns only its filled slots, so the cost of a step grows
with the length of the sequences and not with the capacity. Within `fixed_lengths` a layer returns a
constant number of slots and reads the lengths on the device, as CUDA graphs need
(see cuda_graphs.py).

Letters: L key and value tensors of the layers, B sequences, H key-value heads, S slots, D head
size, N rows of a forward pass, T positions of a path.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

_GRANULE = 256  # slots; sequences of similar length then share one allocation


class _TreeCacheLayer(CacheLayerMixin):
    """One layer of the KV cache; before the allocation it holds the first prompt's tensors."""

    def __init__(self, cache: TreeCache):
        super().__init__()
        # A reference cycle would delay freeing both.
        self.cache = cast(TreeCache, weakref.proxy(cache))
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: `TreeCache` allocates all layers of the KV cache together."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values of a forward pass in the KV cache; return the ones to attend to.

        Before the allocation these are the given ones, later the slots of `TreeCache.write_rows`.
        """
        if self.cache.num_slots == 0:
            self.keys = key_states
            self.values = value_states
            return key_states, value_states
        assert self.keys is not None and self.values is not None
        keys = self.cache.write_rows(self.keys, key_states)
        values = self.cache.write_rows(self.values, value_states)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of KV cache slots filled after the next forward, and mask offset 0."""
        return self.cache.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of cached tokens of the longest sequence."""
        return self.cache.length

    def get_max_length(self) -> int:
        """Return -1: the KV cache has no fixed maximum length."""
        return -1


class TreeCache(Cache):
    """The KV cache of a batch of sequences that are decoded with candidate trees.

    Call `begin_batch`, then `open_sequence`, a forward pass and `keep_prompt` for each prompt.
    After that, each pass over the trees writes its rows, `move_accepted_rows` and `extend_lengths`
    keep the accepted rows, and `drop_sequences` removes finished sequences.
    """

    def __init__(self, config: PretrainedConfig):
        kinds, _ = get_layer_types_and_kwargs(config)  # one per layer with keys of its own
        super().__init__(layers=[_TreeCacheLayer(self) for _ in kinds])
        self.lengths: list[int] = []  # of the open sequences, in the order of their places
        self.num_slots = 0
        self.allocation = 0  # number of allocations: a captured step is bound to one
        self._num_places = 0
        self._wanted = (0, 0)  # slots and places of the next allocation
        self._stores: list[Tensor] = []  # each [L, B, H, S, D]
        self._opening = False
        self._rows: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._fixed_width: int | None = None

    @property
    def length(self) -> int:
        """The number of cached tokens of the longest sequence; 0 during the prefill of a prompt."""
        return 0 if self._opening else max(self.lengths, default=0)

    def begin_batch(self, num_slots: int, num_sequences: int) -> None:
        """Reset the KV cache for a batch whose longest sequence and tree need `num_slots` slots.

        If the allocation is too small, it is freed; `keep_prompt` makes a new one.
        """
        self.lengths = []
        self._rows = {}
        self._opening = False
        self._wanted = (num_slots, num_sequences)
        if num_slots > self.num_slots or num_sequences > self._num_places:
            self.num_slots = 0
            self._num_places = 0
            self._stores = []
            for layer in self.layers:
                layer.keys = layer.values = None

    def open_sequence(self) -> None:
        """Prepare the KV cache for another sequence; the next forward must be its prompt."""
        self._opening = True

    def keep_prompt(self, num_tokens: int) -> None:
        """Add the prefilled prompt to the KV cache as a sequence of `num_tokens` tokens.

        Without an allocation, the cache is allocated for the batch, and the prompt is copied.
        """
        self._opening = False
        self.lengths.append(num_tokens)
        if self.num_slots == 0:
            self._allocate()

    def write_rows(self, part: Tensor, states: Tensor) -> Tensor:
        """Write a layer's new keys or values [B, H, N, D] into `part`, its part of the cache.

        Return the slots [B, H, S, D] to attend to: those that the longest sequence fills, or
        `width` slots within `fixed_lengths`.
        """
        num_rows = states.shape[2]
        width = self._fixed_width or self.length + num_rows
        if len(states) == 1 and self._fixed_width is None:
            # A copy into a slice is faster than an assignment by index.
            place = len(self.lengths) if self._opening else 0
            filled = part.narrow(0, place, 1).narrow(2, 0, width)
            filled.narrow(2, self.length, num_rows).copy_(states)
            return filled
        place_B1, slot_BN = self._rows_on(part.device, num_rows)
        part[place_B1, :, slot_BN] = states.transpose(1, 2)
        return part.narrow(0, 0, len(states)).narrow(2, 0, width)

    def fixed_width(self, num_rows: int) -> int:
        """Return the number of KV cache slots that CUDA graphs read for `num_rows` more rows.

        It is rounded up, so that steps of similar length share a graph.
        """
        return round_up_slots(self.length + num_rows)

    @contextmanager
    def fixed_lengths(self, length_B: Tensor, num_rows: int, width: int) -> Iterator[None]:
        """Context manager that fixes the shapes of `write_rows`, so that it can be captured.

        Within it, `write_rows` writes `num_rows` rows after the lengths `length_B`, a tensor on the
        device, and returns `width` slots. `lengths` is not read.
        """
        self._rows = {length_B.device: _rows_after(length_B, num_rows)}
        self._fixed_width = width
        try:
            yield
        finally:
            self._rows = {}
            self._fixed_width = None

    def extend_lengths(self, num_rows: Sequence[int]) -> None:
        """Add to each sequence's cached length its number of accepted rows, the root included."""
        self.lengths = [sum(pair) for pair in zip(self.lengths, num_rows, strict=True)]
        self._rows = {}

    def drop_sequences(self, kept: Sequence[int]) -> None:
        """Remove all sequences except the batch indices `kept` (ascending) from the KV cache."""
        for place, old in enumerate(kept):
            if place != old:
                for store in self._stores:
                    filled = store.narrow(3, 0, self.lengths[old])
                    filled[:, place].copy_(filled[:, old])
        self.lengths = [self.lengths[old] for old in kept]
        self._rows = {}

    def move_accepted_rows(self, rows_BT: Tensor) -> None:
        """Move the accepted rows of each tree to consecutive slots of the KV cache.

        `rows_BT` holds the rows of each accepted path, the root first. Rows past a path's end are
        padding; their slots are never read.
        """
        for store in self._stores:
            place_B1, slot_BN = self._rows_on(store.device)
            moved_BT = rows_BT[:, 1:].to(store.device)
            places_T = torch.arange(1, rows_BT.shape[1], device=store.device)
            start_B1 = slot_BN[:, :1]
            store[:, place_B1, :, start_B1 + places_T] = store[:, place_B1, :, start_B1 + moved_BT]

    def _rows_on(self, device: torch.device, num_rows: int = 1) -> tuple[Tensor, Tensor]:
        """Return batch indices [B, 1] and KV cache slots [B, N] of the rows to write next."""
        if device not in self._rows:
            self._rows[device] = _rows_after(torch.tensor(self.lengths, device=device), num_rows)
        return self._rows[device]

    def _allocate(self) -> None:
        """Allocate one cache tensor per shape, dtype and device, and copy the first prompt."""
        self.allocation += 1
        self.num_slots, self._num_places = self._wanted
        kinds = defaultdict(list)
        for layer in self.layers:
            for name in ("keys", "values"):
                states = getattr(layer, name)
                _, num_heads, _, size = states.shape
                kinds[num_heads, size, states.dtype, states.device].append((layer, name))
        for (num_heads, size, dtype, device), members in kinds.items():
            shape = (len(members), self._num_places, num_heads, self.num_slots, size)
            # Zeros, because a masked slot must hold finite values.
            store = torch.zeros(shape, dtype=dtype, device=device)
            for part, (layer, name) in zip(store, members, strict=True):
                part[:1].narrow(2, 0, self.lengths[0]).copy_(getattr(layer, name))
                setattr(layer, name, part)
            self._stores.append(store)


def round_up_slots(num_slots: int) -> int:
    """Round a number of KV cache slots up to a multiple of `_GRANULE`."""
    return -(-num_slots // _GRANULE) * _GRANULE


def _rows_after(length_B: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return batch indices [B, 1] and KV cache slots [B, N] of the rows after each sequence."""
    places_B1 = torch.arange(len(length_B), device=length_B.device)[:, None]
    return places_B1, length_B[:, None] + torch.arange(num_rows, device=length_B.device)
