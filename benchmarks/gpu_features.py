"""Benchmark of the features stage on a GPU: share of the peak, and the speed of writing shards."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from benchmarks import rows
from benchmarks.arithmetic import Peak, backbone_flops, peak_memory_gb, reset_peak_memory
from benchmarks.claims import Claim, Result, in_turns, rates, ratio
from benchmarks.deadline import Deadline
from benchmarks.features import AIM as AIM_OVER_FORWARD
from benchmarks.features import forward_seconds, record_batches, stage_seconds
from benchmarks.gpu_size import Size
from pipeline.artifacts.feature_writer import row_edges
from pipeline.artifacts.generated_rows import TokenRow, spans_of
from pipeline.config import FeaturesConfig
from pipeline.stages.features import Worker
from pipeline.storage.shards import ShardTask
from pipeline.targets import transformers_engines
from pipeline.targets.spec import TargetSpec

AIM = 70.0  # percent of the peak
SAMPLE_TOKENS = 131_072  # tokens whose states are written alone


def measure_features(
    model: PreTrainedModel,
    tasks: Sequence[ShardTask],
    made: Sequence[rows.Row],
    size: Size,
    ends: Deadline,
) -> Result:
    """Measure the peak, the bare forward, the whole features stage and writing alone, in turns."""
    if ends():
        return Result([], {}, ["features: shares of the peak, and writing"])
    reset_peak_memory(size.device)
    settings = FeaturesConfig(tokens_per_batch=size.batch_tokens)
    # The random target is on the card, and in no file that the engine could load.
    with patch.object(transformers_engines, "load_on_gpus", lambda *_: model):
        worker = Worker(TargetSpec("random"), settings, gpus=int(size.device.type == "cuda"))
    batches = record_batches(worker, tasks)
    memory = peak_memory_gb(size.device)
    peak = Peak(size.device, torch.bfloat16, size.peak_size)
    with tempfile.TemporaryDirectory() as place:
        writing = WritingAlone(worker, made, Path(place) / "shards" / "alone.parquet")
        sides = {
            "peak": peak.run,
            "bare forward": lambda: forward_seconds(worker, batches),
            "whole stage": lambda: stage_seconds(worker, tasks),
            "writing": writing.run,
        }
        seconds = in_turns(sides, size.rounds, ends=ends)

    lengths = [len(row["input_ids"]) for row in made]
    num_positions = sum(len(span) for row in made for span in spans_of(row["spans"]))
    kept_bytes = num_positions * worker.engine.hidden_size * worker.engine.dtype.itemsize
    peaks = rates(peak.flops, seconds["peak"])
    facts: dict[str, Any] = {
        "tokens": sum(lengths),
        "kept_positions": num_positions,
        "batches": len(batches),
    }
    facts |= {"peak_gpu_memory_gb": memory, "peak_tflops": median(peaks) / 1e12, "seconds": seconds}
    flops, claims = backbone_flops(model, lengths), []
    tokens = {name: rates(sum(lengths), seconds[name]) for name in ("whole stage", "bare forward")}
    in_sides = {f"{name}, tokens/s": median(each) for name, each in tokens.items()}
    for name, aim in (("whole stage", AIM), ("bare forward", None)):
        achieved = {
            "TFLOP/s": flops / median(seconds[name]) / 1e12,
            "peak, TFLOP/s": median(peaks) / 1e12,
        }
        what = f"features, {name}: share of the bf16 peak"
        claims.append(
            ratio(what, rates(flops, seconds[name]), peaks, in_sides | achieved, unit="%", aim=aim)
        )
    stage, forward = tokens.values()
    claims.append(
        ratio(
            "features, whole stage over bare forward",
            stage,
            forward,
            in_sides,
            aim=AIM_OVER_FORWARD,
        )
    )
    return Result([*claims, _writing_claim(writing, seconds, kept_bytes)], facts)


def _writing_claim(
    writing: WritingAlone, seconds: dict[str, list[float]], kept_bytes: int
) -> Claim:
    able = rates(writing.num_bytes / 1e6, seconds["writing"])
    needed = rates(kept_bytes / 1e6, seconds["bare forward"])
    sides = {"writing alone, MB/s": median(able), "the forward's states, MB/s": median(needed)}
    return ratio("features, shards written over states computed", able, needed, sides, aim=1.0)


class WritingAlone:
    """The features stage's writing of shards, without computing: the states are computed before."""

    def __init__(self, worker: Worker, made: Sequence[rows.Row], path: Path):
        totals = accumulate(len(row["input_ids"]) for row in made)
        number = next((n for n, total in enumerate(totals, 1) if total >= SAMPLE_TOKENS), len(made))
        self._rows = [TokenRow.of(row) for row in made[:number]]
        computed = worker.engine.stream(row.input_ids.tolist() for row in self._rows)
        found = {index: hidden_TD.clone() for index, hidden_TD in computed}
        self._hidden = [found[index] for index in range(number)]
        self._path, self._states = path, worker.states
        self.num_bytes = row_edges(self._rows, worker.states)[-1] * worker.states.computed_bytes

    def run(self) -> float:
        started = perf_counter()
        rows.write_features(self._path, self._rows, self._hidden, self._states)
        return perf_counter() - started
