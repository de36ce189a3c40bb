"""Benchmark of the feature cache's reader in training, in MB/s per core.

Claim: at least 300 MB/s per core, with every page's checksum verified.

Measured: training's own reader (`load_batches`: Parquet, checksum, decompression, labels, shuffled
batches) over all steps of an epoch, in bytes of states per second of CPU time, which is the speed
of one core however many share the work. Against: reading the same files by `read_bytes` alone, in
turns. Files are in the page cache. States are random normal numbers, which compress as little as
real states.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, process_time

import torch

from benchmarks import rows
from benchmarks.claims import Claim, Result, in_turns
from pipeline.artifacts.feature_rows import FeatureRows, StateFormat
from pipeline.artifacts.generated_rows import TokenRow
from pipeline.training.feature_batches import EpochPlan, load_batches

AIM = 300.0
VOCAB_SIZE, NUM_HEADS, BATCH_TOKENS = 4096, 5, 16_384
CASES = (
    (512, torch.float32),
    (4096, torch.bfloat16),
)  # hidden size and dtype: a small model's, a 7B model's


def measure(*, tiny: bool = False) -> Result:
    """Measure reading of a small and of a 7B model's states, half a GB of each, in five rounds."""
    torch.set_num_threads(1)  # copies of rows gain nothing from a thread pool
    claims = []
    for hidden_size, dtype in ((32, torch.float32),) if tiny else CASES:
        with tempfile.TemporaryDirectory() as temporary:
            num_rows = 8 if tiny else (512 << 20) // (hidden_size * dtype.itemsize * 384)
            path = Path(temporary) / "shards" / "00000.parquet"
            made = rows.equal_rows(num_rows, num_turns=2, per_turn=256, vocab_size=VOCAB_SIZE)
            hidden, states = _hidden(made, hidden_size, dtype), StateFormat(dtype, hidden_size)
            positions = rows.write_features(
                path, [TokenRow.of(row) for row in made], hidden, states
            )
            claims.append(_claim(path, positions, hidden_size, dtype))
    return Result(claims, {"heads": NUM_HEADS, "batch_tokens": BATCH_TOKENS})


def _hidden(made: list[rows.Row], hidden_size: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for row in made:
        yield torch.randn(len(row["input_ids"]), hidden_size, generator=generator).to(dtype)


def _claim(path: Path, positions: int, hidden_size: int, dtype: torch.dtype) -> Claim:
    features = FeatureRows(
        [str(path)],
        fingerprint=rows.FINGERPRINT,
        num_heads=NUM_HEADS,
        roles=rows.ROLES,
    )
    wall: list[float] = []

    def read() -> float:
        plan = EpochPlan(
            features.lengths("train"), batch_tokens=BATCH_TOKENS, seed=0, epoch=len(wall)
        )
        started, started_cpu = perf_counter(), process_time()
        for _ in load_batches(features, plan, range(plan.num_steps)):
            pass
        wall.append(perf_counter() - started)
        return process_time() - started_cpu

    def read_plainly() -> float:
        started_cpu = process_time()
        path.read_bytes()
        return process_time() - started_cpu

    seconds = in_turns({"reader": read, "plain": read_plainly}, rounds=5)
    megabytes = positions * hidden_size * dtype.itemsize / 1e6
    rates = [megabytes / one for one in seconds["reader"]]
    name = str(dtype).removeprefix("torch.")
    return Claim(
        f"states read per core-second, D = {hidden_size:,}, {name}",
        statistics.median(rates),
        unit="MB/s",
        aim=AIM,
        spread=(min(rates), max(rates)),
        sides={
            "by the clock, MB/s": megabytes / statistics.median(wall[1:]),
            "plain read of the file, MB/s": path.stat().st_size
            / 1e6
            / statistics.median(seconds["plain"]),
            "file over states": path.stat().st_size / 1e6 / megabytes,
        },
    )
