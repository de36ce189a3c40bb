"""Benchmark of the executor's and the driver's overhead per shard, by number of shards.

Claim: the overhead per shard with 10,000 shards is at most 1.5 times that with 100, and the driver
takes at most 100 MB more memory.

One worker sleeps a millisecond instead of computing. Through `RayExecutor.map` alone it returns an
empty receipt; through `run_sharded` it commits a shard of one row, and the driver reads receipts,
writes events and checks the disk. Overhead is wall time minus the worker's own and the start of its
process, per shard. Also reported: the driver's CPU time, including that of finding all shards
finished, as at the start of a resumed run.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.arithmetic import peak_memory_gb, reset_peak_memory
from benchmarks.claims import Claim, Result
from benchmarks.sleepers import Copier, Sleeper
from pipeline.artifacts.seed_rows import SEEDS
from pipeline.config.load import validate
from pipeline.execution.executor import Executor, make_executor
from pipeline.execution.placement import Placement
from pipeline.execution.shard_worker import Outcome
from pipeline.run.context import Context
from pipeline.run.resolved import resolve_run
from pipeline.run.sharded import run_sharded
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.shards import ShardWriter
from pipeline.storage.stage_directory import StageDirectory

SIZES, TINY_SIZES = (100, 1_000, 10_000), (4, 16)
IN_MEMORY = (
    "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
)  # a disk's time to sync is not measured
PLACEMENT = Placement(workers=1, cpus=1, gpus=0)
HOUR = 3600.0
CPU = torch.device("cpu")
AIM_OVERHEAD, AIM_MEMORY_MB = (
    1.5,
    100,
)  # the most shards over the fewest, and minus the fewest


@dataclass(frozen=True)
class Cost:
    """The overhead of a run: time and the driver's CPU time per shard, and the driver's memory."""

    milliseconds: float  # per shard, by the clock
    cpu_milliseconds: float  # per shard, of the driver
    peak_mb: float  # of the driver
    seen_milliseconds: float = 0.0  # per shard, of the driver's CPU, if all shards are finished


def measure(*, tiny: bool = False) -> Result:
    """Measure 100, 1,000 and 10,000 shards with the executor alone and with `run_sharded`."""
    sizes = TINY_SIZES if tiny else SIZES
    executor = make_executor("ray")
    try:
        _mapped(executor, sizes[0])  # a warm-up
        mapped = {size: _mapped(executor, size) for size in sizes}
        staged = {size: _staged(executor, size) for size in sizes}
    finally:
        executor.close()
    claims = [*_claims("RayExecutor.map", mapped), *_claims("run_sharded", staged)]
    seen = {size: cost.seen_milliseconds for size, cost in staged.items()}
    claims.append(_growth("seeing that all are there, CPU time per shard", seen))
    facts = {"map": mapped, "run_sharded": staged}
    return Result(
        claims,
        {name: {size: vars(cost) for size, cost in costs.items()} for name, costs in facts.items()},
    )


class Stopwatch:
    """A wrapper of an executor that times the first outcome, and the workers' later busy time."""

    name = "ray"

    def __init__(self, executor: Executor):
        self.executor, self.start_seconds, self.busy_seconds = executor, 0.0, 0.0

    def map(self, *arguments: Any, **named: Any) -> Iterator[Outcome]:
        started, first = time.perf_counter(), True
        for outcome in self.executor.map(*arguments, **named):
            assert outcome.receipt is not None, outcome
            if first:
                self.start_seconds, first = time.perf_counter() - started, False
            else:
                self.busy_seconds += outcome.receipt.stats["busy"]
            yield outcome


def _mapped(executor: Executor, size: int) -> Cost:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as temporary:
        stage = StageDirectory(Path(temporary), "sleep", "f")
        tasks = deque(map(stage.task, range(size)))
        return _cost(
            executor,
            size,
            lambda watch: deque(watch.map(Sleeper, {}, tasks, PLACEMENT, HOUR), maxlen=0),
        )


def _staged(executor: Executor, size: int) -> Cost:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as temporary:
        upstream = StageDirectory(Path(temporary), "seeds", "a" * 64)
        for index in range(size):
            _write_seed(upstream, index)
        stage = StageDirectory(Path(temporary), "copy", "b" * 64)
        stage.create({})
        nothing = {"target": {"model": "none"}, "seeds": {"sources": "none"}}
        settings = nothing | {
            "run": {"name": "run", "root": temporary},
            "limits": {"min_free_disk_gb": 0},
        }
        resolved = resolve_run(validate(settings, "scheduling"), ["seeds"])
        context = Context(resolved, RunDirectory(Path(temporary)), Console(quiet=True))

        def run(watch: Stopwatch) -> None:
            context.__dict__["executor"] = watch
            totals = run_sharded(context, stage, upstream, Copier, {}, PLACEMENT)
            stage.finish(totals, {})
            assert totals["rows"] == size

        cost = _cost(executor, size, run)
        started = time.process_time()
        assert not stage.examine()
        run(Stopwatch(executor))
        return replace(cost, seen_milliseconds=1e3 * (time.process_time() - started) / size)


def _cost(executor: Executor, size: int, work: Callable[[Stopwatch], Any]) -> Cost:
    watch = Stopwatch(executor)
    reset_peak_memory(CPU)
    started, started_cpu = time.perf_counter(), time.process_time()
    work(watch)
    wall, cpu = time.perf_counter() - started, time.process_time() - started_cpu
    overhead = wall - watch.start_seconds - watch.busy_seconds
    return Cost(1e3 * overhead / size, 1e3 * cpu / size, 1e3 * peak_memory_gb(CPU))


def _write_seed(stage: StageDirectory, index: int) -> None:
    with ShardWriter(stage.task(index), SEEDS) as writer:
        row = {
            "id": f"s:{index}",
            "source_id": None,
            "category": None,
            "split": "train",
            "messages": [],
        }
        writer.write([row])
        writer.commit("seeds", [row["id"]])


def _claims(what: str, costs: dict[int, Cost]) -> list[Claim]:
    few, many = min(costs), max(costs)
    return [
        _growth(
            f"{what}, overhead per shard by the clock",
            {n: cost.milliseconds for n, cost in costs.items()},
        ),
        _growth(
            f"{what}, driver's CPU time per shard",
            {n: cost.cpu_milliseconds for n, cost in costs.items()},
        ),
        Claim(
            f"{what}, driver's memory, {many:,} shards above {few:,}",
            max(0.0, costs[many].peak_mb - costs[few].peak_mb),
            unit="MB",
            aim=AIM_MEMORY_MB,
            at_most=True,
            sides={f"{size:,}, MB": cost.peak_mb for size, cost in costs.items()},
        ),
    ]


def _growth(what: str, milliseconds: dict[int, float]) -> Claim:
    """Return the claim on the growth of a cost per shard from the fewest shards to the most."""
    few, many = min(milliseconds), max(milliseconds)
    sides = {f"{size:,}, ms": each for size, each in milliseconds.items()}
    growth = milliseconds[many] / milliseconds[few]
    return Claim(
        f"{what}, {many:,} shards over {few:,}", growth, aim=AIM_OVERHEAD, at_most=True, sides=sides
    )
