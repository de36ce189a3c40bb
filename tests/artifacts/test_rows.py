"""Rows come back as they were written, and only from the run and the target that they are of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.artifacts.generated_rows import (
    GENERATED,
    TokenRow,
    generated_columns,
    read_token_rows,
)
from pipeline.artifacts.seed_rows import SeedRow, read_seeds
from pipeline.conversations.conversation import Conversation, Message
from pipeline.conversations.row_builder import GeneratedRow
from pipeline.conversations.spans import Span
from pipeline.errors import DamagedShard, DataError
from pipeline.storage.shards import read_rows
from tests.storage.rows import write_shard

FINGERPRINT = "f" * 64
TALK = (Message("user", "Why?"), Message("assistant", "Because."))
GENERATED_ROW = GeneratedRow(
    "s:1#1", "s:1", [5, 6, 7, 8], [Span(2, 4, "assistant")], ["stop"], TALK
)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "shards" / "a.parquet"


def test_seed_rows_are_read_back_by_split(path):
    rows = [
        SeedRow(Conversation("s:1", TALK, "7", "riddles"), "train"),
        SeedRow(Conversation("s:2", TALK[:1]), "check"),
    ]
    write_shard(path, [row.stored() for row in rows])
    assert [SeedRow.of(row) for row in read_rows(path)] == rows
    assert list(read_seeds([path], "train")) == [rows[0].conversation]


def test_token_rows_come_back(path):
    write_shard(path, [generated_columns(GENERATED_ROW, "check")], schema=GENERATED)
    (found,) = read_token_rows([path], FINGERPRINT, vocab_size=9)
    (again,) = map(TokenRow.of, read_rows(path))
    for row in (found, again):
        assert (row.id, row.parent_id, row.split) == ("s:1#1", "s:1", "check")
        assert row.input_ids.dtype == np.int32 and row.input_ids.tolist() == GENERATED_ROW.input_ids
        assert row.spans == GENERATED_ROW.spans
    (stored,) = read_rows(path)
    assert {key: stored[key] for key in found.stored()} == found.stored()


def test_damaged_rows_and_rows_of_another_run_are_refused(path):
    write_shard(path, [generated_columns(GENERATED_ROW, "check")], schema=GENERATED)
    with pytest.raises(DataError, match=f"another run: its fingerprint is {FINGERPRINT}, not 0000"):
        next(read_token_rows([path], "0" * 64))
    with pytest.raises(DataError, match="vocabulary of 8") as caught:
        next(read_token_rows([path], FINGERPRINT, vocab_size=8))
    assert "row s:1#1" in str(caught.value)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DamagedShard):
        next(read_token_rows([path], FINGERPRINT))
