"""Shards of seed rows for the tests of storage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.artifacts.seed_rows import SEEDS
from pipeline.conversations.conversation import RejectedRow
from pipeline.storage.receipts import Receipt
from pipeline.storage.shards import ShardTask, ShardWriter


def seed_row(row_id: str, text: str = "hello") -> dict[str, Any]:
    return {
        "id": row_id,
        "source_id": None,
        "category": None,
        "split": "train",
        "messages": [{"role": "user", "content": text, "tool_calls": None, "learned": True}],
        "tools": None,
    }


def write_shard(
    path: Path,
    rows: Sequence[dict[str, Any]],
    refused: Sequence[RejectedRow] = (),
    *,
    ids_in: Sequence[str] | None = None,
    group_size: int = 100,
    index: int = 0,
    fingerprint: str = "f" * 64,
    upstream: str = "",
    schema: pa.Schema = SEEDS,
) -> Receipt:
    """Write a shard and its quarantine file as in a stage directory."""
    quarantine = path.parent.with_name("quarantine") / f"{path.stem}.jsonl"
    task = ShardTask(index, path, quarantine, fingerprint, upstream=upstream)
    with ShardWriter(task, schema) as writer:
        for start in range(0, len(rows), group_size):
            writer.write(rows[start : start + group_size])
        for row in refused:
            writer.reject(row)
        return writer.commit("seeds", ids_in)
