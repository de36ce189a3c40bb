"""The columns of each stage's shards. Every row has a string `id`, unique within its stage."""

from __future__ import annotations

import pyarrow as pa

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
SPANS = pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32()), ("role", pa.string())]))

SEEDS = pa.schema(
    [
        ("id", pa.string()),
        ("source_id", pa.string()),  # the dump's own id; dumps repeat theirs
        ("category", pa.string()),
        ("split", pa.string()),  # train | calibrate | check
        ("messages", MESSAGES),
    ]
)

GENERATED = pa.schema(
    [
        ("id", pa.string()),
        ("parent_id", pa.string()),  # the seed's id; differs from `id` where a template rewrites its history
        ("split", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("spans", SPANS),  # target-written token ranges [start, end)
        ("finish", pa.list_(pa.string())),  # stop | length, one per span
        ("messages", MESSAGES),
    ]
)

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
