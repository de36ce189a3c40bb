"""States that arrive in any order become the same shard, and no more of them wait than may."""

from __future__ import annotations

import errno
import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.artifacts import feature_writer
from pipeline.artifacts.feature_writer import (
    MAX_WAITING_GROUPS,
    FeatureWriter,
    WaitingMemory,
    row_groups,
)
from pipeline.artifacts.generated_rows import TokenRow
from pipeline.artifacts.state_format import StateFormat
from pipeline.conversations.spans import Span, feature_positions
from pipeline.errors import EnvironmentFault
from pipeline.storage.shards import ShardTask, ShardWriter, open_shard, read_rows

D = 4
STATES = StateFormat(torch.bfloat16, D)
ROW_STATES = StateFormat(torch.bfloat16, D, layers=(1, 3))


def conversations(lengths, held_out=()) -> list[TokenRow]:
    rows = []
    for number, length in enumerate(lengths):
        middle = max(1, length // 2)
        spans = [Span(1, middle, "user")] if middle > 1 else []
        spans.append(Span(middle, length, "assistant"))
        split = "check" if number in held_out else "train"
        rows.append(
            TokenRow(str(number), str(number), split, np.arange(length, dtype=np.int32), spans)
        )
    return rows


def states_of(number: int, row: TokenRow, num_layers: int = 1) -> torch.Tensor:
    return (
        torch.full((len(row.input_ids), D * num_layers), float(number))
        + torch.arange(len(row.input_ids))[:, None] / 8
        + torch.arange(D * num_layers) // D
    ).bfloat16()


def shard(path, rows, order, max_waiting=MAX_WAITING_GROUPS, states=STATES):
    """Write rows, whose states arrive in `order`."""
    num_layers = len(states.state_columns)
    with (
        ShardWriter(ShardTask(0, path, path.with_suffix(".q"), "f"), states.schema) as writer,
        FeatureWriter(writer, rows, states, WaitingMemory(max_waiting)) as features,
    ):
        for number in order:
            features.put(number, states_of(number, rows[number], num_layers))
        features.finish()
        return writer.commit("features", [row.id for row in rows])


@settings(max_examples=25, deadline=None)
@given(data=st.data(), lengths=st.lists(st.integers(2, 30), max_size=12), limit=st.integers(1, 600))
def test_the_order_of_states_does_not_change_a_shard(tmp_path_factory, data, lengths, limit):
    folder, rows = tmp_path_factory.mktemp("shard"), conversations(lengths)
    order = data.draw(st.permutations(range(len(rows))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_writer, "ROW_GROUP_BYTES", limit)
        receipt = shard(folder / "a.parquet", rows, order, 1)
        assert (
            shard(folder / "b.parquet", rows, range(len(rows))).content_sha256
            == receipt.content_sha256
        )
    assert (folder / "a.parquet").read_bytes() == (folder / "b.parquet").read_bytes()
    written = list(read_rows(folder / "a.parquet"))
    assert [found["id"] for found in written] == [row.id for row in rows]
    for number, (row, found) in enumerate(zip(rows, written, strict=True)):
        positions = feature_positions(row.spans)
        kept = states_of(number, row)[torch.from_numpy(positions).long()]
        assert (
            found["positions"] == positions.tolist()
            and found["input_ids"] == row.input_ids.tolist()
        )
        assert found["spans"] == [vars(span) for span in row.spans]
        assert found["hidden"] == kept.view(torch.uint8).numpy().tobytes()


@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(2, 30), min_size=1, max_size=12), limit=st.integers(1, 600))
def test_row_features_have_all_states_in_the_row_groups_of_features(
    tmp_path_factory, lengths, limit
):
    folder, rows = tmp_path_factory.mktemp("shard"), conversations(lengths, held_out={2})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_writer, "ROW_GROUP_BYTES", limit)
        shard(folder / "a", rows, range(len(rows)))
        shard(folder / "b", rows, reversed(range(len(rows))), states=ROW_STATES)
    groups = []
    for name in "ab":
        with open_shard(folder / name) as file:
            groups.append([file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)])
    assert groups[0] == groups[1]
    for number, (row, found) in enumerate(zip(rows, read_rows(folder / "b"), strict=True)):
        assert (found["id"], found["input_ids"]) == (row.id, row.input_ids.tolist())
        states_TX = states_of(number, row, 2)
        for layer, states_TD in zip((1, 3), states_TX.chunk(2, 1), strict=True):
            stored = states_TD.contiguous().view(torch.uint8).numpy().tobytes()
            assert found[f"layer_{layer}"] == stored


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(2, 30), max_size=20),
    limit=st.integers(1, 400),
    held_out=st.sets(st.integers(0, 19)),
)
def test_row_groups_keep_order_and_end_at_size_or_split(lengths, limit, held_out):
    rows = conversations(lengths, held_out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_writer, "ROW_GROUP_BYTES", limit)
        groups = row_groups(rows, STATES)
    assert [row.id for group in groups for row in group] == [row.id for row in rows]
    for group, following in itertools.zip_longest(groups, groups[1:]):
        sizes = [len(feature_positions(row.spans)) * D * 2 for row in group]
        assert limit > sum(sizes[:-1])
        (split,) = {row.split for row in group}
        assert following is None or sum(sizes) >= limit or following[0].split != split


def test_long_prompts_end_a_row_group_early(monkeypatch):
    """Row features store the states of prompts too: twice as many as of answers, and a row."""
    monkeypatch.setattr(feature_writer, "ROW_GROUP_BYTES", 100 * STATES.computed_bytes)
    ids, spans = np.zeros(90, np.int32), [Span(80, 90, "assistant")]
    rows = [TokenRow(str(number), str(number), "train", ids, spans) for number in range(10)]
    groups = row_groups(rows, STATES)
    assert sum(map(len, groups)) == 10
    assert max(map(len, groups)) == 3


@pytest.fixture
def small_groups(monkeypatch):
    """One row of 9 states, 72 bytes, in each group."""
    monkeypatch.setattr(feature_writer, "ROW_GROUP_BYTES", 1)
    return conversations([10] * 6)


def test_computing_waits_for_the_disk(small_groups, tmp_path, monkeypatch):
    may_write, real = threading.Event(), ShardWriter.write_batch

    def slow(self, batch):
        may_write.wait(10)
        real(self, batch)

    monkeypatch.setattr(ShardWriter, "write_batch", slow)
    put = []

    def order():
        for number in range(6):
            yield number
            put.append(number)

    thread = threading.Thread(target=shard, args=(tmp_path / "a", small_groups, order(), 3))
    thread.start()
    thread.join(0.2)
    assert put == [0, 1, 2]  # the fourth waits for room
    may_write.set()
    thread.join(10)
    assert put == [0, 1, 2, 3, 4, 5] and len(list(read_rows(tmp_path / "a"))) == 6


def test_a_full_disk_ends_the_shard(small_groups, tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pipeline.storage.shards.HashedFile.write", full)
    with pytest.raises(EnvironmentFault, match="The disk is full"):
        shard(tmp_path / "a" / "0.parquet", small_groups, range(6), 1)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
