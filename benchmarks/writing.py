"""Benchmark of writing feature shards, in MB/s per core.

Claims: one core writes 400 MB/s of a 7B model's bfloat16 states, checksums and sha256 included, and
a file is at most 1.02 times as large as its states.

Measured: the features stage's work after the forwards, from states on the host to a committed
shard: selecting positions, checking for NaN, Parquet with page checksums, the file's sha256, fsync.
The speed is in bytes of states per second of CPU time, which is one core's however many share the
work.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import torch

from benchmarks import rows
from benchmarks.claims import Claim, Result, in_turns, rates
from pipeline.artifacts.feature_writer import WaitingMemory, row_edges
from pipeline.artifacts.generated_rows import TokenRow
from pipeline.artifacts.state_format import StateFormat

AIM, AIM_OF_SIZE = 400.0, 1.02
HIDDEN_SIZE, ROW_TOKENS, VOCAB_SIZE = 4096, 1024, 32_000


def measure(*, tiny: bool = False) -> Result:
    """Measure the writing of 300 MB of states."""
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
    megabytes = row_edges(made, states)[-1] * states.computed_bytes / 1e6
    clock, sizes = [], []
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "shards" / "00000.parquet"
        path.parent.mkdir()
        waiting = WaitingMemory(2)  # shared by all rounds, as by a worker's shards

        def write() -> float:
            started, started_cpu = perf_counter(), process_time()
            rows.write_features(path, made, hidden, states, waiting)
            clock.append(perf_counter() - started)
            seconds = process_time() - started_cpu
            sizes.append(path.stat().st_size)
            path.unlink()
            return seconds

        seconds = in_turns({"writing": write}, rounds=1 if tiny else 7)["writing"]
    per_core = rates(megabytes, seconds)
    what = f"D = {states.hidden_size:,}, bfloat16"
    speed = Claim(
        f"states written per core-second, {what}",
        median(per_core),
        unit="MB/s",
        aim=AIM,
        spread=(min(per_core), max(per_core)),
        sides={"by the clock, MB/s": megabytes / median(clock)},
    )
    size = Claim(
        f"bytes of the file over its states, {what}",
        sizes[-1] / 1e6 / megabytes,
        aim=None if tiny else AIM_OF_SIZE,
        at_most=True,
    )
    return Result([speed, size], {"megabytes": megabytes, "row_tokens": ROW_TOKENS})
