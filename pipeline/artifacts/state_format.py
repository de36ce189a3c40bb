"""Storage format of hidden states in the shards of `features` and `row-features`.

A feature shard has one state for each target-written token, from which the target predicted it. A
shard of row features has, for every token of a row, the output of each of some decoder layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import pyarrow as pa
import torch
from torch import Tensor

from pipeline.artifacts.generated_rows import SPANS
from pipeline.artifacts.quantized_states import SCALE_BYTES, STORED_DTYPE, dequantize
from pipeline.config import Precision

TOKENS = (
    pa.field("id", pa.string()),
    pa.field("parent_id", pa.string()),
    pa.field("split", pa.string()),
    pa.field("input_ids", pa.list_(pa.int32())),
    pa.field("spans", SPANS),
)
POSITIONS = pa.field("positions", pa.list_(pa.int32()))  # of the states: s-1 … e-2 of spans [s, e)
STATES = pa.large_binary()  # [number of states, D], row-major, dtype and D in the footer
SCALES = pa.list_(pa.float32())  # one per state; 8 bits only
LAST_STATES, LAST_SCALES = "hidden", "scales"  # columns of a feature shard
TAP = "last hidden state after the final norm"
TAP_OF_LAYERS = "outputs of decoder layers, counted from 1, before the final norm"


@dataclass(frozen=True)
class StateFormat:
    """The storage format of the states in a shard.

    Attributes:
        dtype: The target's, in which states are read.
        hidden_size: The numbers of a state.
        precision: The configured precision.
        layers: The layers of row features, ascending; empty for a feature shard.
    """

    dtype: torch.dtype
    hidden_size: int
    precision: Precision = "native"
    layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, footer: Mapping[bytes, bytes], layers: tuple[int, ...] = ()) -> StateFormat:
        """Read the format of states from the schema metadata of a shard, to read these layers."""
        dtype = getattr(torch, footer[b"dtype"].decode())
        precision = cast(Precision, footer[b"precision"].decode())
        return cls(dtype, int(footer[b"hidden_size"]), precision, layers)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype in which a shard stores states."""
        return self.dtype if self.precision == "native" else STORED_DTYPE

    @property
    def state_columns(self) -> list[str]:
        """The columns of states, one per layer."""
        return [f"layer_{layer}" for layer in self.layers] or [LAST_STATES]

    @property
    def scale_columns(self) -> list[str]:
        """The columns of scales, one per column of states; empty unless states have 8 bits."""
        if self.precision == "native":
            return []
        return [f"scales_{layer}" for layer in self.layers] or [LAST_SCALES]

    @property
    def schema(self) -> pa.Schema:
        """The Parquet schema of a shard."""
        fields = [*TOKENS] if self.layers else [*TOKENS, POSITIONS]
        fields += [pa.field(name, STATES) for name in self.state_columns]
        fields += [pa.field(name, SCALES) for name in self.scale_columns]
        return pa.schema(fields)

    @property
    def footer(self) -> dict[str, str]:
        """The format of states as schema metadata of a shard."""
        dtype, size = str(self.dtype).removeprefix("torch."), str(self.hidden_size)
        tap = TAP_OF_LAYERS if self.layers else TAP
        return {"dtype": dtype, "hidden_size": size, "precision": self.precision, "tap": tap}

    @property
    def computed_bytes(self) -> int:
        """The bytes of one state in the target's dtype."""
        return self.hidden_size * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """The bytes of one state in a shard, with its scale, before compression."""
        scale = 0 if self.precision == "native" else SCALE_BYTES
        return self.hidden_size * self.stored_dtype.itemsize + scale

    def states_of_row(self, table: pa.Table, index: int) -> list[Tensor]:
        """Return the states [N, D] of one row of a table, in the target's dtype, per layer."""
        states = []
        for number, name in enumerate(self.state_columns):
            buffer = table[name][index].as_buffer()
            array = pa.Array.from_buffers(pa.uint8(), buffer.size, [None, buffer])
            # DLPack, since torch.frombuffer warns of memory that is read-only.
            stored = torch.from_dlpack(array)
            if not self.scale_columns:
                states.append(stored.view(self.dtype).view(-1, self.hidden_size))
                continue
            scales_N = table[self.scale_columns[number]][index].values.to_numpy()
            stored_ND = stored.view(-1, self.hidden_size).numpy()
            states.append(dequantize(stored_ND, scales_N, self.dtype))
        return states
