"""A preallocated KV cache that trees are written into and that keeps the accepted paths alone.

Keys and values of all layers lie in one tensor (one per shape, dtype and device), so that keeping a path moves the
entries of every layer at once, in place. Each sequence of a batch has its own length and its own place. Layers keep
the full length whatever their attention, since the window is in the mask (see masks.py), and hand out only the filled
part, so that a step costs what its sequences cost, not the capacity. Or, `fixed`, some slots more, always as many, with
the lengths read on the device: what a captured step needs (see cuda_graphs.py).

Letters: L key and value tensors of the layers, B sequences, H key-value heads, S slots, D head size, N rows of a
forward, T positions of a path.
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
    """One layer's part of the cache: before there is room, it holds the first prompt's states as they come."""

    def __init__(self, cache: TreeCache):
        super().__init__()
        self.cache = cast(TreeCache, weakref.proxy(cache))  # in a cycle both would outlive their decoder for a while
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Room is made by the cache, for all layers together."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.cache.num_slots == 0:
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        assert self.keys is not None and self.values is not None
        return self.cache.write(self.keys, key_states), self.cache.write(self.values, value_states)

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
    """The KV cache of a batch.

    `begin` it, `open` and fill one prompt after another; then forwards over the trees of all open sequences write their
    rows, and `keep` keeps those that were accepted. `drop` closes the sequences that have ended.
    """

    def __init__(self, num_layers: int):
        super().__init__(layers=[_TreeCacheLayer(self) for _ in range(num_layers)])
        self.lengths: list[int] = []  # of the open sequences, in the order of their places
        self.num_slots = 0
        self._places = 0
        self._wanted = (0, 0)
        self._stores: list[Tensor] = []  # each [L, B, H, S, D]
        self.allocation = 0  # how often memory was taken: captured steps know the cache by its address
        self._opening = False
        self._rows: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._fixed_width: int | None = None

    @property
    def length(self) -> int:
        """Tokens before the rows of the next forward: of the longest open sequence, or of the prompt being filled."""
        return 0 if self._opening or not self.lengths else max(self.lengths)

    def begin(self, num_slots: int, num_sequences: int = 1) -> None:
        """Forgets the last batch; the longest sequence of the next one and its tree will need `num_slots`."""
        self.lengths, self._rows, self._opening = [], {}, False
        self._wanted = (num_slots, num_sequences)
        if num_slots > self.num_slots or num_sequences > self._places:
            self.num_slots, self._places, self._stores = 0, 0, []
            for layer in self.layers:
                layer.keys = layer.values = None

    def open(self) -> None:
        """The next forward is the prompt of one more sequence."""
        self._opening = True

    def keep_prompt(self, num_tokens: int) -> None:
        """Keeps the prompt's rows, all of them, and makes room for what follows."""
        self._opening = False
        self.lengths.append(num_tokens)
        if self.num_slots == 0:
            self._allocate()

    def write(self, part: Tensor, states: Tensor) -> Tensor:
        """Writes rows [B, H, N, D] behind their sequences' and returns [B, H, S', D]: what is filled of one layer."""
        num_rows = states.shape[2]
        if len(states) == 1 and self._fixed_width is None:
            place = len(self.lengths) if self._opening else 0
            part = part.narrow(0, place, 1)
            part.narrow(2, self.length, num_rows).copy_(states)
            return part.narrow(2, 0, self.length + num_rows)
        place_B1, slot_BN = self._rows_on(part.device, num_rows)
        part[place_B1, :, slot_BN] = states.transpose(1, 2)
        return part.narrow(0, 0, len(states)).narrow(2, 0, self._fixed_width or self.length + num_rows)

    def width(self, num_rows: int) -> int:
        """Slots that hold so many more rows of every open sequence: the same number for many steps."""
        return -(-(self.length + num_rows) // _GRANULE) * _GRANULE

    @contextmanager
    def fixed(self, length_B: Tensor, num_rows: int, width: int) -> Iterator[None]:
        """Within, the sequences' lengths are those on the device alone, and layers hand out `width` slots."""
        device = length_B.device
        places_B1 = torch.arange(len(length_B), device=device)[:, None]
        self._rows = {device: (places_B1, length_B[:, None] + torch.arange(num_rows, device=device))}
        self._fixed_width = width
        try:
            yield
        finally:
            self._rows, self._fixed_width = {}, None

    def keep(self, rows: Sequence[Sequence[int]], rows_BT: Tensor) -> None:
        """Keeps these rows of the last forward, in this order: each sequence's root and accepted nodes, ascending.

        `rows` and `rows_BT` (which may be longer) name the same rows, on the host and on the device, so that nothing
        is copied between them.
        """
        in_place = min(next((i for i, row in enumerate(path) if row != i), len(path)) for path in rows)
        longest = max(map(len, rows))
        if in_place < longest:
            self.move(rows_BT[:, :longest], in_place)
        self.advance(rows)

    def advance(self, rows: Sequence[Sequence[int]]) -> None:
        """Counts these rows of the last forward to their sequences; they lie where they belong."""
        self.lengths = [length + len(path) for length, path in zip(self.lengths, rows, strict=True)]
        self._rows = {}

    def drop(self, kept: Sequence[int]) -> None:
        """Closes all sequences but those at these places, ascending, which move up."""
        for place, old in enumerate(kept):
            if place != old:
                for store in self._stores:
                    filled = store.narrow(3, 0, self.lengths[old])
                    filled[:, place].copy_(filled[:, old])
        self.lengths = [self.lengths[old] for old in kept]
        self._rows = {}

    def move(self, rows_BT: Tensor, first: int) -> None:
        """Moves rows to where the path's positions from `first` belong; what is moved past a path's end is not read."""
        rows_BT = rows_BT[:, first:]
        for store in self._stores:
            self._move(store, rows_BT.to(store.device), first, rows_BT.shape[1])

    def _move(self, store: Tensor, rows_BT: Tensor, first: int, num_moved: int) -> None:
        if len(rows_BT) == 1 and self._fixed_width is None:
            (length,) = self.lengths
            moved = store.narrow(1, 0, 1).index_select(3, rows_BT[0] + length)
            store.narrow(1, 0, 1).narrow(3, length + first, num_moved).copy_(moved)
            return
        place_B1, slot_BN = self._rows_on(store.device)
        targets_BT = slot_BN[:, :1] + torch.arange(first, first + num_moved, device=store.device)
        store[:, place_B1, :, targets_BT] = store[:, place_B1, :, slot_BN[:, :1] + rows_BT]

    def _rows_on(self, device: torch.device, num_rows: int = 1) -> tuple[Tensor, Tensor]:
        """Places [B, 1] and slots [B, N] of the rows that follow the open sequences; the same for every layer."""
        if device not in self._rows:
            places_B1 = torch.arange(len(self.lengths), device=device)[:, None]
            lengths_B1 = torch.tensor(self.lengths, device=device)[:, None]
            self._rows[device] = places_B1, lengths_B1 + torch.arange(num_rows, device=device)
        return self._rows[device]

    def _allocate(self) -> None:
        """One store per kind of tensor, the first prompt's states moved in, and every layer given its part."""
        self.allocation += 1
        wanted_slots, self._places = self._wanted
        self.num_slots = -(-wanted_slots // _GRANULE) * _GRANULE
        kinds = defaultdict(list)
        for layer in self.layers:
            for name in ("keys", "values"):
                states = getattr(layer, name)
                _, num_heads, _, size = states.shape
                kinds[num_heads, size, states.dtype, states.device].append((layer, name))
        for (num_heads, size, dtype, device), members in kinds.items():
            shape = (len(members), self._places, num_heads, self.num_slots, size)
            store = torch.zeros(shape, dtype=dtype, device=device)  # a masked slot still counts, 0 times its value
            for part, (layer, name) in zip(store, members, strict=True):
                part[:1].narrow(2, 0, self.lengths[0]).copy_(getattr(layer, name))
                setattr(layer, name, part)
            self._stores.append(store)
