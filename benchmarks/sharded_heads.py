"""Claim: a worker of two that split their heads takes at most 0.6 of the memory of one that has them whole.

Measured: the peak resident memory of a worker in its first training steps, less what the process had before, on two
workers that meet over gloo: heads, gradients, optimizer, logits, the buffers of sums, and what libraries load meanwhile
(an optimizer's imports are 5 MB). Five untied heads, bf16 products as on a GPU.
Against: the same training with whole heads. Told without an aim: the same less these imports, the process with nothing
taken off, and the time of a step: on one machine's cores and memory a sum over workers costs what no network does.
"""

from __future__ import annotations

import resource
import tempfile
from dataclasses import replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import psutil
import torch
from torch import distributed

from benchmarks import rows, targets
from benchmarks.claims import Claim, Result, ratio
from pipeline.config import FeaturesConfig, TrainConfig
from pipeline.stages.features import Worker
from pipeline.training.phases import phases_of
from pipeline.training.task import TrainSpec, Workers
from pipeline.training.trainer import Trainer

AIM = 0.6
NUM_WORKERS, NUM_HEADS, NUM_STEPS, ROUNDS = 2, 5, 4, 3
SHAPE = targets.TINY | {"vocab_size": 32000, "hidden_size": 1024}


def measure(*, tiny: bool = False) -> Result:
    """Whole and split heads in turns, each time in two new processes."""
    shape = targets.TINY if tiny else SHAPE
    with tempfile.TemporaryDirectory() as temporary:
        spec = _spec(Path(temporary), shape)
        sides = {"split": True, "whole": False}
        found = [
            {name: _run(spec, Path(temporary), split) for name, split in sides.items()}
            for _ in range(1 if tiny else ROUNDS)
        ]
    case = f"{NUM_HEADS} untied heads, {NUM_WORKERS} workers"
    cases = {
        f"memory of a worker with split heads over whole, {case}": "GB",
        f"the same less torch's imports for an optimizer, {case}": "GB",
        f"the same with all that the process has, {case}": "GB",
        f"time of a step with split heads over whole, {case}, one machine": "s",
    }
    claims: list[Claim] = []
    for index, (what, unit) in enumerate(cases.items()):
        each = {name: [one[name][index] for one in found] for name in sides}
        told = {f"{name}, {unit}": median(numbers) for name, numbers in each.items()}
        claims.append(ratio(what, *each.values(), told))
    claims[0] = replace(claims[0], aim=AIM, at_most=True)
    return Result(claims, {"vocab_size": shape["vocab_size"], "hidden_size": shape["hidden_size"], "steps": NUM_STEPS})


def _spec(directory: Path, shape: dict[str, int]) -> TrainSpec:
    target = targets.random_target(directory / "target", shape)
    made = rows.equal_rows(16, 1, 64, shape["vocab_size"])
    (task,) = rows.features_tasks(directory, [made])
    Worker(target, FeaturesConfig(tokens_per_batch=1024), gpus=0)(task)
    settings = TrainConfig(
        heads="medusa", num_heads=NUM_HEADS, precision="bf16", soft_labels=0.0, batch_tokens=128, epochs=4
    )
    return rows.train_spec(target, settings, directory / "train", [task], torch.device("cpu"))


def _run(spec: TrainSpec, directory: Path, split: bool) -> list[float]:
    """The largest of the workers' GB: of training, of it without imports, of the process; and the seconds of a step."""
    spec = replace(spec, settings=spec.settings.model_copy(update={"shard_heads": split}))
    with tempfile.TemporaryDirectory(dir=directory) as place:
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        results: Any = context.Queue()
        others = [context.Process(target=_work, args=(spec, rank, place, results)) for rank in range(NUM_WORKERS)]
        for other in others:
            other.start()
        found = [results.get() for _ in others]
        for other in others:
            other.join()
    return [max(each) for each in zip(*found, strict=True)]


def _work(spec: TrainSpec, rank: int, place: str, results: Any) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=NUM_WORKERS)
    ((_, of_phase, learner),) = phases_of(spec)
    before = psutil.Process().memory_info().rss
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True).zero_grad()
    imported = psutil.Process().memory_info().rss
    trainer = Trainer(learner(of_phase, Workers(rank, NUM_WORKERS), torch.device("cpu")))
    seconds = []
    for step, batches in enumerate(islice(trainer.learner.steps(0), NUM_STEPS)):
        started = perf_counter()
        trainer.step(step, batches)
        seconds.append(perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    results.put(((peak - before) / 1e9, (peak - imported) / 1e9, peak / 1e9, median(seconds[1:])))
    distributed.destroy_process_group()
