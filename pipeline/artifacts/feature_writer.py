"""Writer of shards of states: states arrive in any order, row groups are written in order.

It writes feature shards and row features (see `StateFormat`), with the same rows in a row group.
As states arrive, they are copied into the buffer of their row group. When a group is complete, a
thread checks it, quantizes it to 8 bits if configured, and writes it from this buffer.
`WaitingMemory` limits the number of groups that wait to be written.

Letters: T tokens of a row, N positions of a group, L layers (1 in a feature shard), D hidden size,
X = L times D.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from pipeline.artifacts.generated_rows import SPANS, TokenRow
from pipeline.artifacts.quantized_states import quantize
from pipeline.artifacts.state_format import POSITIONS, StateFormat
from pipeline.conversations.conversation import Reason, RejectedRow
from pipeline.conversations.spans import feature_positions
from pipeline.storage.shards import ShardWriter

ROW_GROUP_BYTES = 64 * 1024**2  # of a feature shard's states; a reader holds one group at a time
MAX_TOKENS_SHARE = 2  # tokens of a row group over the answers that fill it
MAX_WAITING_GROUPS = 32  # 2 GiB of states in a feature shard


def max_waiting_groups(num_layers: int) -> int:
    """Return how many row groups may wait to be written; `num_layers` is 0 for a feature shard.

    The states of whole rows are taken to be twice the states of answers, for each layer.
    """
    return max(1, MAX_WAITING_GROUPS // max(1, 2 * num_layers))


class WaitingMemory:
    """Buffers of row groups that wait to be written, shared by all feature shards of a worker.

    `slots` limits the number of waiting groups.
    """

    def __init__(self, max_groups: int = MAX_WAITING_GROUPS):
        self.slots = threading.Semaphore(max_groups)
        self._free: list[Tensor] = []  # memory of groups that are written

    def take(self, num_bytes: int) -> Tensor:
        """Return a uint8 buffer of at least `num_bytes`, reused from a written group if possible.

        Filling newly allocated memory takes five times as long as filling a reused buffer.
        """
        if self._free:
            memory = self._free.pop()
            if len(memory) >= num_bytes:
                return memory
        return torch.empty(num_bytes, dtype=torch.uint8)

    def give_back(self, memory: Tensor) -> None:
        """Take back the buffer of a written row group, and allow another group to wait."""
        self._free.append(memory)
        self.slots.release()


class WaitingGroup:
    """The rows of one row group, and the buffer that their states are copied to."""

    def __init__(self, rows: Sequence[TokenRow], states: StateFormat, waiting: WaitingMemory):
        self.rows, self.states = rows, states
        self.edges = row_edges(rows, states)
        shape = (len(states.state_columns), self.edges[-1], states.hidden_size)
        num_bytes = shape[0] * shape[1] * states.computed_bytes
        self.memory = waiting.take(num_bytes)
        self.hidden_LND = self.memory[:num_bytes].view(states.dtype).view(shape)
        self.missing = len(rows)

    def put(self, index: int, hidden_TX: Tensor) -> None:
        """Copy the states of a row that are stored into the group's buffer.

        Args:
            index: The row's index in the group.
            hidden_TX: The states of all tokens of the row.
        """
        hidden_LTD = hidden_TX.unflatten(1, (len(self.hidden_LND), -1)).transpose(0, 1)
        start = self.edges[index]
        for tokens in stored_tokens(self.rows[index], self.states):
            stop = start + len(tokens)
            self.hidden_LND[:, start:stop] = hidden_LTD[:, tokens.start : tokens.stop]
            start = stop
        self.missing -= 1

    def write(self, writer: ShardWriter) -> int:
        """Write the rows with finite states as a row group, and return its number of positions.

        The other rows are rejected.
        """
        rows, states = [], [self.hidden_LND[:, :0]]
        for row, (start, stop) in zip(self.rows, itertools.pairwise(self.edges), strict=True):
            hidden_LND = self.hidden_LND[:, start:stop]
            # The extrema are finite if and only if all numbers are; they take 1/40 of the time.
            if start == stop or torch.isfinite(torch.stack(hidden_LND.aminmax())).all():
                rows.append(row)
                states.append(hidden_LND)
                continue
            num_bad = int((~torch.isfinite(hidden_LND).all(2).all(0)).sum())
            detail = f"{num_bad} of {stop - start} states are NaN or infinite"
            writer.reject(RejectedRow(row.id, Reason.NON_FINITE, detail, row.stored()))
        hidden_LND = self.hidden_LND
        if len(rows) < len(self.rows):
            hidden_LND = torch.cat(states, 1)
        if rows:
            writer.write_batch(state_batch(rows, hidden_LND, self.states))
        return hidden_LND.shape[1]


def stored_tokens(row: TokenRow, states: StateFormat) -> list[range]:
    """Return the ranges of tokens whose states a row stores.

    In row features these are all tokens, in a feature shard those before target-written tokens.
    """
    if states.layers:
        return [range(len(row.input_ids))]
    return [range(span.start - 1, span.end - 1) for span in row.spans]


def row_edges(rows: Sequence[TokenRow], states: StateFormat) -> list[int]:
    """Return where the rows' states begin and end: row i has the states [edges[i], edges[i+1])."""
    sizes = [sum(map(len, stored_tokens(row, states))) for row in rows]
    return [0, *itertools.accumulate(sizes)]


def row_groups(rows: Iterable[TokenRow], states: StateFormat) -> list[list[TokenRow]]:
    """Divide rows, in order, into row groups of one split and about `ROW_GROUP_BYTES` of states.

    The size counts the states in a feature shard. A group also ends before its tokens, prompts
    included, have `MAX_TOKENS_SHARE` times as many states, which row features store. It ends where
    the split changes, so that held-out rows can be read without training rows.
    """
    groups: list[list[TokenRow]] = []
    size = ROW_GROUP_BYTES
    for row in rows:
        answers = sum(map(len, row.spans))
        row_size = max(answers, len(row.input_ids) // MAX_TOKENS_SHARE) * states.computed_bytes
        if size >= ROW_GROUP_BYTES or groups[-1][-1].split != row.split:
            groups.append([])
            size = 0
        groups[-1].append(row)
        size += row_size
    return groups


def state_batch(
    rows: Sequence[TokenRow], hidden_LND: Tensor, states: StateFormat
) -> pa.RecordBatch:
    """Return rows with their states [L, N, D] as a record batch, in the stored precision."""
    edges = row_edges(rows, states)
    columns = {
        "id": [row.id for row in rows],
        "parent_id": [row.parent_id for row in rows],
        "split": [row.split for row in rows],
        "input_ids": _list_column([row.input_ids for row in rows]),
        "spans": pa.array([[asdict(span) for span in row.spans] for row in rows], SPANS),
    }
    if not states.layers:
        columns[POSITIONS.name] = _list_column([feature_positions(row.spans) for row in rows])
    ends = np.asarray(edges, np.int64) * states.hidden_size * states.stored_dtype.itemsize
    for number, (name, hidden_ND) in enumerate(zip(states.state_columns, hidden_LND, strict=True)):
        if states.scale_columns:
            hidden_ND, scales_N = quantize(hidden_ND)
            scales = pa.ListArray.from_arrays(pa.array(edges, pa.int32()), scales_N.numpy())
            columns[states.scale_columns[number]] = scales
        data = pa.py_buffer(hidden_ND.view(torch.uint8).numpy())
        buffers = [None, pa.py_buffer(ends), data]
        columns[name] = pa.Array.from_buffers(pa.large_binary(), len(rows), buffers)
    return pa.RecordBatch.from_pydict(columns, schema=states.schema)


def _list_column(values: Sequence[npt.NDArray[np.int32]]) -> pa.ListArray:
    """Return NumPy arrays as one Arrow column of lists."""
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(values)))


class FeatureWriter:
    """Context manager that writes a shard of states in a thread, while later ones are computed.

    Exit it before the context of the shard writer. To keep the shard, call `finish` first.

    Args:
        writer: The open writer of the shard, which only this object uses.
        rows: The shard's rows, in order.
        waiting: The buffers of row groups, shared with the worker's other shards.
    """

    def __init__(
        self,
        writer: ShardWriter,
        rows: Sequence[TokenRow],
        states: StateFormat,
        waiting: WaitingMemory,
    ):
        self._writer, self._states, self._waiting = writer, states, waiting
        self._rows = row_groups(rows, states)
        self._starts = [0, *itertools.accumulate(map(len, self._rows))]  # each group's first row
        self._groups: dict[int, WaitingGroup] = {}
        self._writing: list[Future[int]] = []
        self._thread = ThreadPoolExecutor(1)
        self._failed: BaseException | None = None

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the thread, which skips the row groups that it has not begun to write."""
        self._failed = self._failed or InterruptedError()
        self._thread.shutdown()

    def put(self, index: int, hidden_TX: Tensor) -> None:
        """Copy a row's states into its row group, and write row groups that are complete.

        If too many groups wait to be written, this call blocks.

        Args:
            index: The row's index in the shard.
            hidden_TX: The states of all tokens of the row.

        Raises:
            EnvironmentFault: Writing has failed, for example on a full disk.
        """
        number = bisect.bisect(self._starts, index) - 1
        if number not in self._groups:
            group = WaitingGroup(self._rows[number], self._states, self._waiting)
            self._groups[number] = group
        self._groups[number].put(index - self._starts[number], hidden_TX)
        following = len(self._writing)
        while following in self._groups and not self._groups[following].missing:
            group = self._groups.pop(following)
            self._waiting.slots.acquire()
            self._writing.append(self._thread.submit(self._write_group, group))
            following += 1
        if self._failed:
            raise self._failed

    def finish(self) -> int:
        """Wait until all row groups are written, and return the shard's number of positions.

        Raises:
            AssertionError: Some rows have no states yet.
            EnvironmentFault: Writing has failed, for example on a full disk.
        """
        assert len(self._writing) == len(self._rows), "a row group lacks states"
        return sum(writing.result() for writing in self._writing)

    def _write_group(self, group: WaitingGroup) -> int:
        """Write a row group and return its number of positions; after a failure only return 0."""
        try:
            return 0 if self._failed else group.write(self._writer)
        except BaseException as error:
            self._failed = error
            raise
        finally:
            self._waiting.give_back(group.memory)
