"""The writer of feature shards: states arrive in any order, row groups are written in order.

A row's states are copied into the memory of its row group as they arrive. A thread checks a
complete group, quantizes it to 8 bits if configured, encodes, checksums and writes it, straight
from that memory. `WaitingMemory` bounds the groups that wait, and so how far computing runs ahead
of the disk.

Letters: T tokens of a row, N positions of a group, D hidden size.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from pipeline.artifacts.feature_rows import FEATURES, SCALES, StateFormat
from pipeline.artifacts.generated_rows import SPANS, TokenRow
from pipeline.artifacts.quantized_states import quantize
from pipeline.conversations.conversation import Reason, RejectedRow
from pipeline.conversations.spans import feature_positions
from pipeline.storage.receipts import Receipt
from pipeline.storage.shards import ShardWriter

ROW_GROUP_BYTES = 64 * 1024**2  # of states; a reader holds one group at a time
MAX_WAITING_GROUPS = 32  # 2 GiB, one window of an engine: the next is computed while it is written


class WaitingMemory:
    """Memory of the row groups that wait to be written, shared by a worker's feature shards."""

    def __init__(self, max_groups: int = MAX_WAITING_GROUPS):
        self.slots = threading.Semaphore(max_groups)
        self._free: list[Tensor] = []  # memory of groups that are written

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer for a feature shard's row group, if possible that of a written group.

        Filling newly allocated memory takes five times as long as filling a reused buffer.
        """
        if self._free:
            memory = self._free.pop()
            if len(memory) >= num_bytes:
                return memory
        return torch.empty(num_bytes, dtype=torch.uint8)

    def give_back(self, memory: Tensor) -> None:
        """Take back the memory of a feature shard's written row group; let another group wait."""
        self._free.append(memory)
        self.slots.release()


class WaitingGroup:
    """Feature rows that become one row group, and the memory that their states are copied to."""

    def __init__(self, rows: Sequence[TokenRow], states: StateFormat, waiting: WaitingMemory):
        self.rows, self.states = rows, states
        self.edges = row_edges(rows)
        num_bytes = self.edges[-1] * states.computed_bytes
        self.memory = waiting.take(num_bytes)
        self.hidden_ND = self.memory[:num_bytes].view(states.dtype).view(-1, states.hidden_size)
        self.missing = len(rows)

    def put(self, index: int, hidden_TD: Tensor) -> None:
        """Copy to the group the states of a feature row that predict its target-written tokens.

        `index` is the row's in the group, and `hidden_TD` has the states of all its tokens.
        """
        start = self.edges[index]
        for span in self.rows[index].spans:
            stop = start + len(span)
            self.hidden_ND[start:stop] = hidden_TD[span.start - 1 : span.end - 1]
            start = stop
        self.missing -= 1

    def write(self, writer: ShardWriter) -> int:
        """Write feature rows with finite states as a row group; return the positions written.

        The other rows are rejected. To store 8 bits, the group's memory is overwritten.
        """
        rows, states = [], [self.hidden_ND[:0]]
        for row, (start, stop) in zip(self.rows, itertools.pairwise(self.edges), strict=True):
            hidden_ND = self.hidden_ND[start:stop]
            # The extrema are finite if all are, and forty times as fast to find.
            if not len(hidden_ND) or torch.isfinite(torch.stack(hidden_ND.aminmax())).all():
                rows.append(row)
                states.append(hidden_ND)
                continue
            num_bad = int((~torch.isfinite(hidden_ND).all(dim=1)).sum())
            detail = f"{num_bad} of {len(hidden_ND)} states are NaN or infinite"
            writer.reject(RejectedRow(row.id, Reason.NON_FINITE, detail, row.stored()))
        hidden_ND = self.hidden_ND
        if len(rows) < len(self.rows):
            hidden_ND = torch.cat(states)
        if rows:
            writer.write_batch(self._record_batch(rows, hidden_ND))
        return len(hidden_ND)

    def _record_batch(self, rows: Sequence[TokenRow], hidden_ND: Tensor) -> pa.RecordBatch:
        """Return feature rows with their states as a record batch, in the stored precision.

        States of 8 bits are written over the start of the group's memory.
        """
        if self.states.precision == "native":
            return feature_batch(rows, hidden_ND)
        stored_ND = (
            self.memory[: hidden_ND.numel()].view(self.states.stored_dtype).view(hidden_ND.shape)
        )
        scales_N = quantize(hidden_ND, self.states.precision, stored_ND)
        edges = pa.array(row_edges(rows), pa.int32())
        scales = pa.ListArray.from_arrays(edges, pa.array(scales_N.numpy()))
        return feature_batch(rows, stored_ND).append_column(SCALES, scales)


def num_positions(row: TokenRow) -> int:
    """Count the states that a feature row stores: one per target-written token."""
    return sum(map(len, row.spans))


def row_edges(rows: Sequence[TokenRow]) -> list[int]:
    """Return the offsets of feature rows in their states: row i has [edges[i], edges[i+1])."""
    return [0, *itertools.accumulate(map(num_positions, rows))]


def row_groups(rows: Iterable[TokenRow], states: StateFormat) -> list[list[TokenRow]]:
    """Divide feature rows, in order, into row groups of one split and about `ROW_GROUP_BYTES`.

    Held-out rows have groups of their own, so that reading them does not read the training rows,
    which are a hundred times as many.
    """
    groups: list[list[TokenRow]] = []
    size = ROW_GROUP_BYTES
    for row in rows:
        if size >= ROW_GROUP_BYTES or groups[-1][-1].split != row.split:
            groups.append([])
            size = 0
        groups[-1].append(row)
        size += num_positions(row) * states.computed_bytes
    return groups


def feature_batch(rows: Sequence[TokenRow], hidden_ND: Tensor) -> pa.RecordBatch:
    """Return feature rows with their states as a record batch; states are not copied."""
    ends = np.asarray(row_edges(rows), np.int64) * hidden_ND.shape[1] * hidden_ND.itemsize
    data = pa.py_buffer(hidden_ND.view(torch.uint8).numpy())
    buffers = [None, pa.py_buffer(ends), data]
    columns = {
        "id": [row.id for row in rows],
        "parent_id": [row.parent_id for row in rows],
        "split": [row.split for row in rows],
        "input_ids": _list_column([row.input_ids for row in rows]),
        "spans": pa.array([[asdict(span) for span in row.spans] for row in rows], SPANS),
        "positions": _list_column([feature_positions(row.spans) for row in rows]),
        "hidden": pa.Array.from_buffers(pa.large_binary(), len(rows), buffers),
    }
    return pa.RecordBatch.from_pydict(columns, schema=FEATURES)


def _list_column(values: Sequence[npt.NDArray[np.int32]]) -> pa.ListArray:
    """Return NumPy arrays as one Arrow column of lists in a feature shard."""
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(values)))


class FeatureWriter:
    """Context manager that writes a feature shard in a thread, while later states are computed.

    Leave it before the context of the shard writer. To keep the shard, wait for the future of
    `commit` before that.

    Args:
        writer: The shard's, open. Only this object uses it until `commit`.
        rows: The shard's rows, in order.
        waiting: The memory for row groups, shared with the shards before and after.
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
        """Wait for the thread, which discards the row groups that it has not begun to write."""
        self._failed = self._failed or InterruptedError()
        self._thread.shutdown()

    def put(self, index: int, hidden_TD: Tensor) -> None:
        """Copy one feature row's states; block while too many row groups wait to be written.

        Raises:
            EnvironmentFault: Writing has failed, for example on a full disk.
        """
        number = bisect.bisect(self._starts, index) - 1
        if number not in self._groups:
            group = WaitingGroup(self._rows[number], self._states, self._waiting)
            self._groups[number] = group
        self._groups[number].put(index - self._starts[number], hidden_TD)
        following = len(self._writing)
        while following in self._groups and not self._groups[following].missing:
            group = self._groups.pop(following)
            self._waiting.slots.acquire()
            self._writing.append(self._thread.submit(self._write_group, group))
            following += 1
        if self._failed:
            raise self._failed

    def commit(
        self,
        stage: str,
        ids_in: Sequence[str] | None,
        num_tokens: int = 0,
        started: float = 0.0,
    ) -> Future[Receipt]:
        """Commit the feature shard in the thread after all of its row groups; return a future.

        Args:
            num_tokens: The rows' tokens, as the receipt states them.
            started: The worker's `time.monotonic()` when it began the shard.

        Raises:
            AssertionError: Some rows have no states yet.
        """
        lacking = f"{len(self._groups)} row groups of {stage} lack states"
        assert len(self._writing) == len(self._rows), lacking

        def finish() -> Receipt:
            """Commit the feature shard with its number of positions."""
            positions = sum(writing.result() for writing in self._writing)
            stats = {"positions": float(positions), "tokens": float(num_tokens)}
            return self._writer.commit(stage, ids_in, stats, time.monotonic() - started)

        return self._thread.submit(finish)

    def _write_group(self, group: WaitingGroup) -> int:
        """Write a feature shard's row group; return its positions, or 0 after a failure."""
        try:
            return 0 if self._failed else group.write(self._writer)
        except BaseException as error:
            self._failed = error
            raise
        finally:
            self._waiting.give_back(group.memory)
