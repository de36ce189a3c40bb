"""Feature rows: the tokens of a conversation, and a hidden state per target-written token.

`FeatureRows` reads states as torch tensors in the target's dtype; states stored in 8 bits are
dequantized. The *learnable* positions of a row are those at which head 0 has a label; at other
positions no head has one. `feature_writer` writes the rows.

Letters: N positions, M states, D hidden size, K heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from pipeline.artifacts.generated_rows import SPANS, StoredSpans, open_rows, spans_of
from pipeline.artifacts.quantized_states import SCALE_BYTES, STORED_DTYPE, dequantize
from pipeline.config import Precision
from pipeline.conversations.conversation import Role
from pipeline.conversations.spans import IGNORED, feature_positions, head_labels

FEATURES = pa.schema(
    [
        ("id", pa.string()),
        ("parent_id", pa.string()),
        ("split", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("spans", SPANS),
        ("positions", pa.list_(pa.int32())),  # s-1 … e-2 of every span [s, e)
        ("hidden", pa.large_binary()),  # [len(positions), D], row-major, dtype and D in the footer
    ]
)
SCALES = pa.field("scales", pa.list_(pa.float32()))  # one per position; 8 bits only
TAP = "last hidden state after the final norm"


@dataclass(frozen=True)
class StateFormat:
    """The storage format of the states in a feature shard."""

    dtype: torch.dtype  # the target's, in which states are read
    hidden_size: int
    precision: Precision = "native"

    @classmethod
    def of(cls, footer: Mapping[bytes, bytes]) -> StateFormat:
        """Read the format of states from the schema metadata of a feature shard."""
        dtype = getattr(torch, footer[b"dtype"].decode())
        precision = cast(Precision, footer[b"precision"].decode())
        return cls(dtype, int(footer[b"hidden_size"]), precision)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype in which a feature shard stores states."""
        return self.dtype if self.precision == "native" else STORED_DTYPE

    @property
    def schema(self) -> pa.Schema:
        """The Parquet schema of a feature shard."""
        return FEATURES if self.precision == "native" else FEATURES.append(SCALES)

    @property
    def footer(self) -> dict[str, str]:
        """The format of states as schema metadata of a feature shard."""
        dtype, size = str(self.dtype).removeprefix("torch."), str(self.hidden_size)
        return {"dtype": dtype, "hidden_size": size, "precision": self.precision, "tap": TAP}

    @property
    def computed_bytes(self) -> int:
        """The bytes of one state in the target's dtype."""
        return self.hidden_size * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """The bytes of one state in a feature shard, with its scale, before compression."""
        scale = 0 if self.precision == "native" else SCALE_BYTES
        return self.hidden_size * self.stored_dtype.itemsize + scale


@dataclass(frozen=True)
class FeatureRow:
    """One row's states, and the tokens and labels at its learnable positions."""

    parent_id: str  # of the conversation, which may have several rows
    hidden_ND: Tensor  # all stored positions
    learnable: Tensor  # int64, indices in `hidden_ND` of the learnable positions
    next_N: npt.NDArray[np.int32]  # the tokens that follow the learnable positions
    labels_KN: npt.NDArray[np.int32]  # at the learnable positions alone

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
    ):
        self.fingerprint = fingerprint
        self.num_heads, self.roles = num_heads, tuple(roles)
        self._groups: list[tuple[Path, int]] = []
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._splits: list[npt.NDArray[np.object_]] = []
        for path in shards:
            with open_rows(path, fingerprint) as shard:
                self.states = StateFormat.of(shard.schema_arrow.metadata)
                for group in range(shard.num_row_groups):
                    self._groups.append((path, group))
                    columns = ["split", "spans"]
                    table = shard.read_row_group(group, columns=columns, use_threads=False)
                    self._lengths.append(_num_learnable(table["spans"].to_pylist(), self.roles))
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
        columns = ["parent_id", "input_ids", "spans", "hidden"]
        if self.states.precision != "native":
            columns.append(SCALES.name)
        with open_rows(path, self.fingerprint) as shard:
            table = shard.read_row_group(group, columns=columns, use_threads=False)
        return [self._feature_row(table, index) for index in range(len(table))]

    def _feature_row(self, table: pa.Table, index: int) -> FeatureRow:
        """Build a feature row from one row of a row group's table."""
        ids = table["input_ids"][index].values.to_numpy()
        spans = spans_of(table["spans"][index].as_py())
        labels_KN = head_labels(ids, spans, self.num_heads, self.roles)
        learnable = np.flatnonzero(labels_KN[0] != IGNORED)
        next_N = ids[feature_positions(spans)[learnable] + 1]
        hidden_ND = self._hidden_states(table, index)
        parent_id = table["parent_id"][index].as_py()
        labels_KN = labels_KN[:, learnable]
        return FeatureRow(parent_id, hidden_ND, torch.from_numpy(learnable), next_N, labels_KN)

    def _hidden_states(self, table: pa.Table, index: int) -> Tensor:
        """Return the hidden states [N, D] of one row of the table, in the target's dtype."""
        states, buffer = self.states, table["hidden"][index].as_buffer()
        # DLPack, since torch.frombuffer warns of memory that is read-only.
        stored = torch.from_dlpack(pa.Array.from_buffers(pa.uint8(), buffer.size, [None, buffer]))
        if states.precision == "native":
            return stored.view(states.dtype).view(-1, states.hidden_size)
        scales_N = table["scales"][index].values.to_numpy()
        stored_ND = stored.view(-1, states.hidden_size).numpy()
        return dequantize(stored_ND, scales_N, states.dtype)


def _num_learnable(rows: Sequence[StoredSpans], roles: Sequence[Role]) -> npt.NDArray[np.int64]:
    """Count each row's learnable positions: len(span) - 1 for each span of these roles."""
    lengths = np.zeros(len(rows), np.int64)
    for index, spans in enumerate(rows):
        for span in spans_of(spans):
            if span.role in roles:
                lengths[index] += len(span) - 1
    return lengths
