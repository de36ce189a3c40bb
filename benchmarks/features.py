"""Benchmark of the features stage's speed over the speed of the backbone's bare forward.

Claim: at least 0.85 of the forward's tokens per second.

Measured: the stage's worker over shards of ragged conversations: reading rows, batching, forward,
selecting positions, compressing, writing, committing. Against: the bare forward,
`base_model(input_ids)`, over the same batches, recorded by a hook. Both count the conversations'
tokens without padding. A random backbone of 50M parameters represents a real target; the demo's,
whose forward is ten times cheaper, is the hard case.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch
from transformers import PreTrainedModel

from benchmarks import rows, targets
from benchmarks.claims import Claim, Result, in_turns, speed_ratio
from pipeline.config import FeaturesConfig
from pipeline.stages.features import Worker
from pipeline.storage.shards import ShardTask
from pipeline.targets.spec import TargetSpec, model_config
from pipeline.targets.transformers_engines import TransformersFeatureEngine

AIM = 0.85
TOKENS_PER_BATCH = 8192  # the demo's
NUM_SHARDS = 2


def measure(*, tiny: bool = False) -> Result:
    """Measure the features stage with two backbones.

    The faster one is measured in more rounds, since its timing is noisier.
    """
    shape, row_tokens = (targets.TINY, (8, 24)) if tiny else (targets.BACKBONE, (64, 512))
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        large, demo = (
            targets.random_target(directory / "large", shape),
            targets.demo_target(directory / "demo"),
        )
        cases = [
            ("a random backbone of 50M parameters", large, 4 if tiny else 20, 3),
            ("the demo's backbone", demo, 4 if tiny else 96, 9),
        ]
        claims = [
            _claim(what, target, directory, rows_, rounds, row_tokens)
            for what, target, rows_, rounds in cases
        ]
    facts = {"tokens_per_batch": TOKENS_PER_BATCH, "shards": NUM_SHARDS, "row_tokens": row_tokens}
    return Result(
        claims, facts | {"written_share": rows.WRITTEN_SHARE, "threads": torch.get_num_threads()}
    )


def _claim(
    what: str,
    target: TargetSpec,
    directory: Path,
    rows_per_shard: int,
    rounds: int,
    row_tokens: tuple[int, int],
) -> Claim:
    vocab_size = model_config(target).get_text_config().vocab_size
    made = rows.ragged_rows(NUM_SHARDS * rows_per_shard, *row_tokens, vocab_size)
    shards = [made[first : first + rows_per_shard] for first in range(0, len(made), rows_per_shard)]
    with tempfile.TemporaryDirectory(dir=directory) as place:
        tasks = rows.features_tasks(Path(place), shards)
        worker = Worker(target, FeaturesConfig(tokens_per_batch=TOKENS_PER_BATCH), gpus=0)
        batches = record_batches(worker, tasks)
        sides = {
            "whole stage": lambda: stage_seconds(worker, tasks),
            "bare forward": lambda: forward_seconds(worker, batches),
        }
        seconds = in_turns(sides, rounds, warm_up=False)  # both have run by now
    num_tokens = sum(len(row["input_ids"]) for row in made)
    return speed_ratio(f"whole stage over bare forward, {what}", seconds, num_tokens, "tokens", AIM)


def record_batches(worker: Worker, tasks: Sequence[ShardTask]) -> list[torch.Tensor]:
    """Run the features worker once; return the backbone's input batches."""
    seen: list[torch.Tensor] = []
    hook = backbone(worker).register_forward_pre_hook(
        lambda _, __, given: seen.append(given["input_ids"].clone()), with_kwargs=True
    )
    stage_seconds(worker, tasks)
    hook.remove()
    return seen


def stage_seconds(worker: Worker, tasks: Sequence[ShardTask]) -> float:
    """Return the seconds of the whole features worker, shard after shard."""
    started = perf_counter()
    for task in tasks:
        worker(task)
    return perf_counter() - started


@torch.inference_mode()
def forward_seconds(worker: Worker, batches: Sequence[torch.Tensor]) -> float:
    """Return the seconds of the backbone's forwards alone; the states are discarded."""
    forward = backbone(worker)
    started = perf_counter()
    for ids_BT in batches:
        forward(input_ids=ids_BT, use_cache=False)
    if batches[0].is_cuda:
        torch.cuda.synchronize()
    return perf_counter() - started


def backbone(worker: Worker) -> PreTrainedModel:
    """Return the backbone module that the features worker runs."""
    assert isinstance(worker.engine, TransformersFeatureEngine)
    return worker.engine.model.base_model
