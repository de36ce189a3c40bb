"""Benchmark of Medusa-1 training on a GPU: share of the peak, memory, and the speed of reading."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Literal

from benchmarks import rows
from benchmarks.arithmetic import (
    Peak,
    peak_memory_gb,
    reset_peak_memory,
    synchronize,
    training_flops,
)
from benchmarks.claims import Claim, Result, in_turns, rates, ratio
from benchmarks.deadline import Deadline
from benchmarks.gpu_size import Size
from pipeline.artifacts.generated_rows import spans_of
from pipeline.config import MedusaConfig, TrainConfig
from pipeline.conversations.spans import IGNORED, head_labels
from pipeline.heads.shapes import MedusaShape
from pipeline.storage.shards import ShardTask
from pipeline.targets.spec import TargetSpec
from pipeline.training.feature_batches import EpochPlan, load_batches
from pipeline.training.heads_only import open_features
from pipeline.training.metrics import read_metrics
from pipeline.training.task import TrainSpec, product_dtype
from pipeline.training.trainer import train

Kind = Literal["untied", "tied"]

AIM = 55.0  # percent of the peak
NUM_HEADS = 5


def measure_training(
    target: TargetSpec,
    tasks: Sequence[ShardTask],
    made: Sequence[rows.Row],
    directory: Path,
    size: Size,
    ends: Deadline,
) -> Result:
    """Measure the peak, reading alone, and training of untied and tied heads, in turns."""
    if ends():
        return Result([], {}, ["training: shares of the peak, and reading"])
    kinds: tuple[Kind, ...] = ("untied", "tied")
    trainings = {
        kind: Training(_spec(target, tasks, directory, size, kind), size) for kind in kinds
    }
    spec = trainings["untied"].spec
    peak = Peak(size.device, product_dtype(spec.settings, size.device), size.peak_size)
    reading = ReadingAlone(spec, size)
    peak.run(), reading.run()  # warm up; training does not time its own first steps
    sides = {"peak": peak.run, "reading": reading.run} | {
        kind: each.run for kind, each in trainings.items()
    }
    seconds = in_turns(sides, size.rounds, warm_up=False, ends=ends)

    peaks, reads = (
        rates(peak.flops, seconds["peak"]),
        rates(reading.num_positions, seconds["reading"]),
    )
    labels_per_position = _labels_per_position(made)
    claims: list[Claim] = []
    for kind, training in trainings.items():
        config = MedusaShape(spec.hidden_size, spec.vocab_size, NUM_HEADS, lm_head=kind)
        learned = rates(training.num_positions, seconds[kind])
        done = [each * training_flops(config, 1, labels_per_position) for each in learned]
        sides_of = {
            "positions/s": median(learned),
            "TFLOP/s": median(done) / 1e12,
            "peak, TFLOP/s": median(peaks) / 1e12,
        }
        sides_of["peak GPU memory, GB"] = training.memory_gb
        what = f"training {NUM_HEADS} {kind} heads"
        claims.append(ratio(f"{what}: share of the peak", done, peaks, sides_of, unit="%", aim=AIM))
        sides_of = {
            "reading alone, positions/s": median(reads),
            "training, positions/s": median(learned),
        }
        claims.append(
            ratio(f"{what}: shards read over states learned", reads, learned, sides_of, aim=1.0)
        )
    facts = {
        "batch_tokens": size.batch_tokens,
        "epochs": size.epochs,
        "left_out_steps": size.warm_steps,
    }
    return Result(claims, facts | {"seconds": seconds, "optimizer": spec.settings.optimizer})


class Training:
    """A training from the start; the first steps, in which a GPU warms up, are not timed."""

    def __init__(self, spec: TrainSpec, size: Size):
        self.spec, self._size = spec, size
        self.num_positions, self.memory_gb = 0, 0.0

    def run(self) -> float:
        """Train; return the seconds of the timed steps, and count their positions."""
        reset_peak_memory(self._size.device)
        self.spec.path.mkdir()
        train(self.spec)
        lines = [line for line in read_metrics(self.spec.path) if "loss" in line]
        shutil.rmtree(self.spec.path)  # gigabytes of heads
        self.memory_gb = peak_memory_gb(self._size.device)
        first, last = lines[self._size.warm_steps - 1], lines[-1]
        self.num_positions = last["tokens"] - first["tokens"]
        return (
            last["tokens"] / last["tokens_per_second"]
            - first["tokens"] / first["tokens_per_second"]
        )


class ReadingAlone:
    """Training's reader alone: the batches of one epoch, copied to the device and not used."""

    def __init__(self, spec: TrainSpec, size: Size):
        self._rows, self._device = open_features(spec), size.device
        self._plan = EpochPlan(
            self._rows.lengths("train"), batch_tokens=size.batch_tokens, seed=spec.seed
        )
        self.num_positions = self._plan.num_positions

    def run(self) -> float:
        started = perf_counter()
        for _ in load_batches(
            self._rows, self._plan, range(self._plan.num_steps), device=self._device
        ):
            pass
        synchronize(self._device)
        return perf_counter() - started


def _spec(
    target: TargetSpec, tasks: Sequence[ShardTask], directory: Path, size: Size, lm_head: Kind
) -> TrainSpec:
    settings = TrainConfig(
        heads="medusa",
        num_heads=NUM_HEADS,
        medusa=MedusaConfig(lm_head=lm_head),
        batch_tokens=size.batch_tokens,
        epochs=size.epochs,
        soft_labels=0.0,
        checkpoint_every=10**9,
    )
    return rows.train_spec(target, settings, directory / f"train-{lm_head}", tasks, size.device)


def _labels_per_position(made: Sequence[rows.Row]) -> float:
    """Return the number of labels per position, summed over the heads.

    It is below the number of heads, because heads have no label beyond the end of a span.
    """
    labels = [
        head_labels(row["input_ids"], spans_of(row["spans"]), NUM_HEADS, rows.ROLES) != IGNORED
        for row in made
    ]
    return sum(int(each.sum()) for each in labels) / sum(int(each[0].sum()) for each in labels)
