"""Benchmark of the features stage's overlap of computing and writing, with simulated hardware.

Claim: over several shards, at least 0.92 of the speed of the slower of GPU and disk.

Measured: the stage's worker, which gets the next shard's task before each shard, as from the
executors; tokens per second from reading the first shard's rows to the last commit. The simulated
GPU computes 36,000 tokens a second by the clock, batch after batch, whatever the host does, as an
H100 does with a 7B model, and returns bfloat16 states of that model's size. The simulated disk
writes a fixed number of MB a second, of all shards together. Against: the speed of GPU or disk, by
arithmetic. Batches, windows and shards are 16 times smaller than by default, so that a short run
has as many windows as a long one.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks import rows
from benchmarks.claims import Claim, Result
from pipeline.artifacts.feature_writer import num_positions
from pipeline.artifacts.generated_rows import TokenRow
from pipeline.config import FeaturesConfig
from pipeline.stages.features import Worker
from pipeline.storage.shards import HashedFile, ShardTask
from pipeline.targets import transformers_engines
from pipeline.targets.spec import TargetSpec

AIM = 0.92
CARD_TOKENS, DISK_MEGABYTES = 36_000, (200, 330, 600)  # per second
HIDDEN_SIZE, TOKENS_PER_BATCH, VOCAB_SIZE = 4096, 1024, 32_000
PAGE_CACHE_BYTES = 32e6
NUM_SHARDS, ROWS_PER_SHARD, ROW_TOKENS, ROUNDS = 10, 192, (64, 512), 3


def measure(*, tiny: bool = False) -> Result:
    """Measure the features stage with three disks, from slower than the GPU to much faster."""
    num_shards, num_rows = (2, 4) if tiny else (NUM_SHARDS, ROWS_PER_SHARD)
    made = rows.ragged_rows(num_shards * num_rows, *ROW_TOKENS, VOCAB_SIZE)
    shards = [made[first : first + num_rows] for first in range(0, len(made), num_rows)]
    claims = [_claim(shards, megabytes, 1 if tiny else ROUNDS) for megabytes in DISK_MEGABYTES]
    facts = {"shards": num_shards, "rows_per_shard": num_rows, "tokens_per_batch": TOKENS_PER_BATCH}
    return Result(claims, facts | {"card_tokens": CARD_TOKENS, "written_share": rows.WRITTEN_SHARE})


def _claim(shards: Sequence[Sequence[rows.Row]], megabytes: int, rounds: int) -> Claim:
    found = [TokenRow.of(row) for shard in shards for row in shard]
    tokens, positions = sum(len(row.input_ids) for row in found), sum(map(num_positions, found))
    card: Any = SimulatedCard()
    rates = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as place, simulated_disk(megabytes * 1e6):
            settings = FeaturesConfig(tokens_per_batch=TOKENS_PER_BATCH)
            with mock.patch.multiple(
                transformers_engines, load_on_gpus=lambda *_: card, verify_tap=lambda _: None
            ):
                worker = Worker(TargetSpec("simulated"), settings, gpus=0)
            rates.append(tokens / _seconds(worker, rows.features_tasks(Path(place), shards)))
    disk_tokens = megabytes * 1e6 * tokens / (positions * HIDDEN_SIZE * 2)
    slower = min(CARD_TOKENS, disk_tokens)
    sides = {
        "stage, tokens/s": median(rates),
        "card, tokens/s": float(CARD_TOKENS),
        "disk, tokens/s": disk_tokens,
    }
    return Claim(
        f"the features stage over the slower of a card of {CARD_TOKENS:,} tokens/s and a disk of"
        f" {megabytes} MB/s",
        median(rates) / slower,
        aim=AIM,
        spread=(min(rates) / slower, max(rates) / slower),
        sides=sides,
    )


def _seconds(worker: Worker, tasks: Sequence[ShardTask]) -> float:
    """Return the features worker's seconds for all shards; committed shards are deleted."""
    with ThreadPoolExecutor(1) as deleting:
        started = perf_counter()
        for task, upcoming in zip(tasks, [*tasks[1:], None], strict=True):
            worker.expect(upcoming)
            worker(task)
            deleting.submit(task.shard.unlink)
        seconds = perf_counter() - started
    worker.close()
    return seconds


class SimulatedCard:
    """A simulated GPU in place of a loaded model; returns random states at a fixed speed.

    A batch begins when the previous batch has ended, or later. As with a GPU, a batch can be queued
    before that.
    """

    dtype = torch.bfloat16
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=HIDDEN_SIZE))

    def __init__(self) -> None:
        self._states_TD = torch.randn(4 * TOKENS_PER_BATCH, HIDDEN_SIZE).to(self.dtype)
        self._ends = 0.0

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(weight=self._states_TD)

    def base_model(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        """Queue a batch and return its states, once the previous batch has ended.

        Padding takes no time.
        """
        previous, tokens = self._ends, int(input_ids.count_nonzero())
        self._ends = max(perf_counter(), previous) + tokens / CARD_TOKENS
        sleep(max(0.0, previous - perf_counter()))
        num_rows, longest = input_ids.shape
        states_BTD = self._states_TD[: num_rows * longest].view(num_rows, longest, HIDDEN_SIZE)
        return SimpleNamespace(last_hidden_state=states_BTD)


@contextmanager
def simulated_disk(bytes_per_second: float) -> Iterator[None]:
    """Context manager: limit the speed at which shards are written, all files together.

    A write waits only while more than PAGE_CACHE_BYTES are still to be written. A sync waits until
    all bytes are written.
    """
    write, sync, turn = HashedFile.write, os.fsync, threading.Lock()
    idle_from = perf_counter()

    def cached(file: HashedFile, data: Any) -> int:
        nonlocal idle_from
        num_bytes = write(file, data)
        with turn:
            idle_from = max(perf_counter(), idle_from) + num_bytes / bytes_per_second
        sleep(max(0.0, idle_from - PAGE_CACHE_BYTES / bytes_per_second - perf_counter()))
        return num_bytes

    def synced(handle: int) -> None:
        sync(handle)
        sleep(max(0.0, idle_from - perf_counter()))

    with (
        mock.patch.object(HashedFile, "write", cached),
        mock.patch("os.fsync", synced),
    ):
        yield
