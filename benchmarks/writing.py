"""Benchmark of writing feature shards, in MB/s per core.

Claim: one core writes 400 MB/s of a 7B model's bfloat16 states, checksums and sha256 included, and
is 2.5 times as fast as the former code, which wrote through Python lists.

Measured: the features stage's work after the forwards, from states on the host to a committed
shard: selecting positions, checking for NaN, Parquet with page checksums, the file's sha256, fsync.
The speed is in bytes of states per second of CPU time, which is one core's however many share the
work. Against: the former code, kept here: a list of Python rows, `from_pylist`, a second
serialization for the content's hash, zstd. States are random normal numbers, which zstd compresses
like real states: docs/benchmarks.md.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from benchmarks import rows
from benchmarks.claims import Claim, Result, in_turns, rates, ratio
from pipeline.artifacts.feature_rows import FEATURES, StateFormat
from pipeline.artifacts.feature_writer import WaitingMemory, num_positions, row_groups
from pipeline.artifacts.generated_rows import TokenRow
from pipeline.conversations.spans import feature_positions
from pipeline.storage.shards import HashedFile

AIM, AIM_OVER_BEFORE = 400.0, 2.5
HIDDEN_SIZE, ROW_TOKENS, VOCAB_SIZE = 4096, 1024, 32_000


def measure(*, tiny: bool = False) -> Result:
    """Measure the former code and the present one with two codecs on 300 MB of states, in turns."""
    torch.set_num_threads(1)  # a core for the stage's writer, and none for torch's threads
    states = StateFormat(torch.bfloat16, 64 if tiny else HIDDEN_SIZE)
    made = [
        TokenRow.of(row)
        for row in rows.equal_rows(4 if tiny else 48, 2, ROW_TOKENS // 2, VOCAB_SIZE)
    ]
    generator = torch.Generator().manual_seed(0)
    few = [
        torch.randn(ROW_TOKENS, states.hidden_size, generator=generator).to(states.dtype)
        for _ in range(8)
    ]
    hidden = [few[index % len(few)] for index in range(len(made))]
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "shards" / "00000.parquet"
        waiting = WaitingMemory(2)  # shared by all rounds, as by a worker's shards
        path.parent.mkdir()
        sides = {
            "before": _Side(lambda: write_as_before(path, made, hidden, states), path),
            "none": _Side(
                lambda: rows.write_features(path, made, hidden, states, "none", waiting), path
            ),
            "zstd": _Side(
                lambda: rows.write_features(path, made, hidden, states, "zstd", waiting), path
            ),
        }
        seconds = in_turns(
            {name: side.run for name, side in sides.items()}, rounds=1 if tiny else 7
        )
    megabytes = sum(map(num_positions, made)) * states.computed_bytes / 1e6
    per_core = {name: rates(megabytes, each) for name, each in seconds.items()}
    what = f"states written per core-second, D = {states.hidden_size:,}, bfloat16"
    claims = [
        Claim(
            f"{what}, codec {name}",
            median(per_core[name]),
            unit="MB/s",
            aim=AIM if name == rows.DEFAULT_CODEC else None,
            spread=(min(per_core[name]), max(per_core[name])),
            sides={
                "by the clock, MB/s": megabytes / median(sides[name].wall),
                "file over states": sides[name].size(megabytes),
            },
        )
        for name in ("none", "zstd")
    ]
    in_sides = {"now, MB/s": median(per_core["none"]), "before, MB/s": median(per_core["before"])}
    over = ratio(
        f"{what}, over the path before",
        per_core["none"],
        per_core["before"],
        in_sides,
        aim=AIM_OVER_BEFORE,
    )
    return Result([*claims, over], {"megabytes": megabytes, "row_tokens": ROW_TOKENS})


class _Side:
    """A way to write a feature shard; `run` returns CPU seconds, `wall` keeps elapsed seconds."""

    def __init__(self, write: Callable[[], object], path: Path):
        self._write, self._path = write, path
        self.wall: list[float] = []
        self._bytes = 0

    def run(self) -> float:
        started, started_cpu = perf_counter(), process_time()
        self._write()
        self.wall.append(perf_counter() - started)
        seconds = process_time() - started_cpu
        self._bytes = self._path.stat().st_size
        self._path.unlink()
        return seconds

    def size(self, megabytes: float) -> float:
        """Return the bytes of the file over the bytes of its states."""
        return self._bytes / 1e6 / megabytes


def write_as_before(
    path: Path, made: Sequence[TokenRow], hidden: Sequence[Tensor], states: StateFormat
) -> None:
    """Write a feature shard as the former code did: Python rows, serialized twice for the hash."""
    content, remaining = hashlib.sha256(), iter(hidden)
    with HashedFile(path) as file:
        writer = pq.ParquetWriter(
            pa.PythonFile(file, mode="w"),
            FEATURES.with_metadata(states.footer),
            compression="zstd",
            compression_level=1,
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )
        for group in row_groups(made, states):
            listed = [_listed(row, next(remaining)) for row in group]
            batch = pa.RecordBatch.from_pylist(listed, schema=FEATURES)
            content.update(memoryview(batch.serialize()))
            writer.write_batch(batch, row_group_size=len(listed))
        writer.close()
        os.fsync(file.fileno())


def _listed(row: TokenRow, hidden_TD: Tensor) -> dict[str, Any]:
    positions = feature_positions(row.spans)
    kept_ND = hidden_TD[torch.from_numpy(positions).long()]
    assert math.isfinite(float(kept_ND.sum(dtype=torch.float32)))
    return {
        **row.stored(),
        "positions": positions,
        "hidden": kept_ND.view(torch.uint8).numpy().tobytes(),
    }
