"""Row features: the outputs of some of the target's layers at every token of a row.

Letters: T tokens of a row, D hidden size, X = D times the number of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipeline.artifacts.generated_rows import open_rows
from pipeline.artifacts.state_format import StateFormat


class RowStates:
    """States of rows in the shards of `row-features`, read by row id.

    A row group of the feature shards of the same text needs the rows of one row group here.

    Args:
        shards: The shards' paths, in order.
        fingerprint: The fingerprint of the stage `row-features`, which every shard must have.
        layers: The layers to read, ascending.

    Raises:
        DamagedShard: A shard is missing or damaged.
        DataError: A shard has another fingerprint.
        EnvironmentFault: The file system cannot read a shard.
    """

    def __init__(self, shards: Sequence[Path], *, fingerprint: str, layers: Sequence[int]):
        self.fingerprint = fingerprint
        self._group_of: dict[str, tuple[Path, int]] = {}
        for path in shards:
            with open_rows(path, fingerprint) as shard:
                self.states = StateFormat.of(shard.schema_arrow.metadata, tuple(layers))
                for group in range(shard.num_row_groups):
                    table = shard.read_row_group(group, columns=["id"], use_threads=False)
                    for name in table["id"].to_pylist():
                        self._group_of[name] = (path, group)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which states are read: the target's."""
        return self.states.dtype

    @property
    def size(self) -> int:
        """The size X of the states of a position."""
        return len(self.states.layers) * self.states.hidden_size

    def __contains__(self, name: str) -> bool:
        """Return whether there are states of the row with this id."""
        return name in self._group_of

    def read(self, names: Sequence[str]) -> dict[str, list[Tensor]]:
        """Read the states [T, D] of each layer, by row id; rows without states are left out.

        Raises what the constructor raises.
        """
        states = self.states
        columns = ["id", *states.state_columns, *states.scale_columns]
        wanted = set(names)
        found = {}
        for path, group in sorted({self._group_of[name] for name in wanted if name in self}):
            with open_rows(path, self.fingerprint) as shard:
                table = shard.read_row_group(group, columns=columns, use_threads=False)
            for index, name in enumerate(table["id"].to_pylist()):
                if name in wanted:
                    found[name] = states.states_of_row(table, index)
        return found
