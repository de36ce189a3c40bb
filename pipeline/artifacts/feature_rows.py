"""Feature rows: the tokens of a conversation, and a hidden state per target-written token.

`FeatureRows` reads states as torch tensors in the target's dtype; states stored in 8 bits are
dequantized. For heads that read whole rows, a row also has the states of `RowStates`. The
*learnable* positions of a row are those at which head 0 has a label; at other positions no head has
one. `feature_writer` writes the rows.

Letters: T tokens of a row, N positions, M states, D hidden size, X numbers that heads read at a
token, K heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from pipeline.artifacts.generated_rows import StoredSpans, open_rows, spans_of
from pipeline.artifacts.row_states import RowStates
from pipeline.artifacts.state_format import StateFormat
from pipeline.conversations.conversation import Role
from pipeline.conversations.spans import IGNORED, feature_positions, head_labels
from pipeline.heads.rows import Rows


@dataclass(frozen=True)
class FeatureRow:
    """One row's states, and the tokens and labels at its learnable positions.

    `layers` holds the states [T, D] of each layer that heads read at every token of the row.
    """

    parent_id: str  # of the conversation, which may have several rows
    input_ids: npt.NDArray[np.int32]  # [T]
    hidden_ND: Tensor  # all stored positions
    learnable: Tensor  # int64, indices in `hidden_ND` of the learnable positions
    next_N: npt.NDArray[np.int32]  # the tokens that follow the learnable positions
    labels_KN: npt.NDArray[np.int32]  # at the learnable positions alone
    positions_N: npt.NDArray[np.int64]  # the learnable positions, as places in `input_ids`
    layers: Sequence[Tensor] = ()

    @property
    def states_TX(self) -> Tensor:
        """The states of all layers side by side, [T, X]."""
        return torch.cat(list(self.layers), 1)

    def whole_row(self) -> Rows:
        """Return the row as heads with `row_layers` read it, up to its last learnable position."""
        ids_T = torch.from_numpy(self.input_ids.astype(np.int64))
        return Rows.of_text(self.states_TX, ids_T, torch.from_numpy(self.positions_N))

    def answers(self) -> list[npt.NDArray[np.int32]]:
        """Return the token ids of each span that has labels, in order."""
        # A span's last state has no label: a gap in the learnable positions starts a span.
        first = np.flatnonzero(np.diff(self.learnable.numpy(), prepend=-2) != 1)
        answers = []
        for start, stop in itertools.pairwise([*first.tolist(), len(self.next_N)]):
            last_token = self.labels_KN[0, stop - 1 : stop]
            answers.append(np.concatenate([self.next_N[start:stop], last_token]))
        return answers

    def soft_label_states(self, start: int, stop: int) -> tuple[Tensor, npt.NDArray[np.int64]]:
        """Return states [M, D] for soft labels, and the index of each label's state [K, N].

        The label of head k at position t is the token at t+2+k. The state at t+1+k predicts it, and
        is stored wherever there is such a label. The index is -1 where there is no label.

        Args:
            start, stop: The range [start, stop) of learnable positions.
        """
        labels_KN, chosen_N = self.labels_KN[:, start:stop], self.learnable[start:stop].numpy()
        first = int(chosen_N[0])
        rows_KN = chosen_N - first + 1 + np.arange(len(labels_KN))[:, None]
        states_MD = self.hidden_ND[first : int(chosen_N[-1]) + 1 + len(labels_KN)]
        return states_MD, np.where(labels_KN == IGNORED, -1, rows_KN)


class FeatureRows:
    """Rows of feature shards, read by row group.

    Args:
        shards: The shards' paths, in order.
        fingerprint: The features stage's fingerprint, which every shard must have.
        num_heads: K.
        roles: The roles whose spans give labels.
        row_states: The states of whole rows, for heads that read them. A row that it lacks has no
            learnable positions.

    Raises:
        DamagedShard: A shard is missing or damaged.
        DataError: A shard has another fingerprint.
        EnvironmentFault: The file system cannot read a shard.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        *,
        fingerprint: str,
        num_heads: int,
        roles: Collection[Role],
        row_states: RowStates | None = None,
    ):
        self.fingerprint = fingerprint
        self.num_heads, self.roles = num_heads, tuple(roles)
        self.row_states = row_states
        self._groups: list[tuple[Path, int]] = []
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._splits: list[npt.NDArray[np.object_]] = []
        for path in shards:
            with open_rows(path, fingerprint) as shard:
                self.states = StateFormat.of(shard.schema_arrow.metadata)
                for group in range(shard.num_row_groups):
                    self._groups.append((path, group))
                    columns = ["id", "split", "spans"]
                    table = shard.read_row_group(group, columns=columns, use_threads=False)
                    lengths = _num_learnable(table["spans"].to_pylist(), self.roles)
                    if row_states is not None:
                        lengths *= [name in row_states for name in table["id"].to_pylist()]
                    self._lengths.append(lengths)
                    self._splits.append(table["split"].to_numpy())

    def lengths(self, split: str) -> list[npt.NDArray[np.int64]]:
        """Return the number of learnable positions of each row, in one array per row group.

        Rows outside the split have 0.
        """
        return [
            np.where(splits == split, n, 0)
            for splits, n in zip(self._splits, self._lengths, strict=True)
        ]

    def read_group(self, index: int) -> list[FeatureRow]:
        """Read the rows of one row group into memory; raise what the constructor raises."""
        path, group = self._groups[index]
        states = self.states
        columns = ["id", "parent_id", "input_ids", "spans"]
        columns += [*states.state_columns, *states.scale_columns]
        with open_rows(path, self.fingerprint) as shard:
            table = shard.read_row_group(group, columns=columns, use_threads=False)
        names = table["id"].to_pylist()
        layers = self.row_states.read(names) if self.row_states else {}
        rows = []
        for row, name in enumerate(names):
            rows.append(self._feature_row(table, row, layers.get(name, ())))
        return rows

    def _feature_row(self, table: pa.Table, index: int, layers: Sequence[Tensor]) -> FeatureRow:
        """Build a feature row from one row of a row group's table, and its states per layer."""
        ids = table["input_ids"][index].values.to_numpy()
        spans = spans_of(table["spans"][index].as_py())
        labels_KN = head_labels(ids, spans, self.num_heads, self.roles)
        learnable = np.flatnonzero(labels_KN[0] != IGNORED)
        positions_N = feature_positions(spans)[learnable].astype(np.int64)
        (hidden_ND,) = self.states.states_of_row(table, index)
        return FeatureRow(
            parent_id=table["parent_id"][index].as_py(),
            input_ids=ids,
            hidden_ND=hidden_ND,
            learnable=torch.from_numpy(learnable),
            next_N=ids[positions_N + 1],
            labels_KN=labels_KN[:, learnable],
            positions_N=positions_N,
            layers=layers,
        )


def _num_learnable(rows: Sequence[StoredSpans], roles: Sequence[Role]) -> npt.NDArray[np.int64]:
    """Count each row's learnable positions: len(span) - 1 for each span of these roles."""
    lengths = np.zeros(len(rows), np.int64)
    for index, spans in enumerate(rows):
        for span in spans_of(spans):
            if span.role in roles:
                lengths[index] += len(span) - 1
    return lengths
