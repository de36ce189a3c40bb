"""Benchmark of a training step on a GPU, by kind of head and size of vocabulary: speed and memory.

Checkpoints of each kind are measured too: how long training waits for the copy, and how long the
checkpoint takes to reach the disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import MistralConfig

from benchmarks import rows
from benchmarks.arithmetic import peak_memory_gb, reset_peak_memory, synchronize
from benchmarks.claims import Claim, Result
from benchmarks.deadline import Deadline
from benchmarks.gpu_size import Size
from pipeline.config import MedusaConfig, TrainConfig
from pipeline.storage.shards import ShardTask
from pipeline.targets.spec import TargetSpec
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.heads_only import HeadsLearner
from pipeline.training.task import TrainSpec, Workers
from pipeline.training.trainer import Trainer, TrainState

NUM_HEADS, WARM_STEPS, STEPS = 5, 2, 5
KINDS: dict[str, dict[str, Any]] = {
    "recurrent": {"heads": "recurrent"},
    "tied": {"heads": "medusa", "medusa": MedusaConfig(lm_head="tied")},
    "shared": {"heads": "medusa", "medusa": MedusaConfig(lm_head="shared")},
    "untied": {"heads": "medusa", "medusa": MedusaConfig(lm_head="untied")},
}


def measure_heads(
    tasks: Sequence[ShardTask], directory: Path, size: Size, ends: Deadline
) -> Result:
    """Measure a training step of each kind of head at each size of vocabulary."""
    claims: list[Claim] = []
    missing: list[str] = []
    for vocabulary in size.vocabularies:
        target = _matrices_alone(size, vocabulary, directory / f"target-{vocabulary}")
        for name, heads in KINDS.items():
            what = f"{NUM_HEADS} {name} heads, V = {vocabulary:,}"
            if ends():
                missing.append(f"speed, memory and checkpoint of {what}")
                continue
            settings = TrainConfig(
                **heads, num_heads=NUM_HEADS, batch_tokens=size.batch_tokens, epochs=100, lr=1e-3
            )
            spec = rows.train_spec(
                target, settings, directory / f"{name}-{vocabulary}", tasks, size.device
            )
            claims += _measured(spec, what, size)
            shutil.rmtree(spec.path)
    return Result(claims, {"batch_tokens": size.batch_tokens, "steps": STEPS}, missing)


def _measured(spec: TrainSpec, what: str, size: Size) -> list[Claim]:
    spec.path.mkdir()
    reset_peak_memory(size.device)
    trainer = Trainer(HeadsLearner(spec, Workers(), size.device))
    return [_speed(trainer, what, size), _memory(what, size), _checkpoint(trainer, what, size)]


def _speed(trainer: Trainer, what: str, size: Size) -> Claim:
    seconds, positions = [], 0
    for step, batches in zip(range(WARM_STEPS + STEPS), trainer.learner.steps(0), strict=False):
        synchronize(size.device)
        started = perf_counter()
        positions = trainer.step(step, batches).positions
        seconds.append(perf_counter() - started)
    return Claim(f"training {what}", positions / median(seconds[WARM_STEPS:]), unit="positions/s")


def _memory(what: str, size: Size) -> Claim:
    return Claim(f"memory of a step, {what}", peak_memory_gb(size.device), unit="GB")


def _checkpoint(trainer: Trainer, what: str, size: Size) -> Claim:
    with Checkpoints(trainer.learner.spec.path / "checkpoints", trainer.settings) as checkpoints:
        synchronize(size.device)
        started = perf_counter()
        trainer.save(checkpoints, TrainState(step=1))
        waited = perf_counter() - started
        checkpoints.wait()
        written = perf_counter() - started
        stored = checkpoints.path(1).stat().st_size / 1e9
    sides = {"until on disk, s": written, "size, GB": stored}
    return Claim(f"a checkpoint of {what}: training waits", waited, unit="s", sides=sides)


def _matrices_alone(size: Size, vocabulary: int, directory: Path) -> TargetSpec:
    """Write a target's configuration, with random lm_head and embedding, for training."""
    MistralConfig(
        **{**size.shape, "vocab_size": vocabulary}, tie_word_embeddings=False
    ).save_pretrained(directory)
    generator = torch.Generator().manual_seed(0)
    shape = (vocabulary, size.shape["hidden_size"])
    names = ("lm_head.weight", "model.embed_tokens.weight")
    matrices = {
        name: torch.randn(shape, generator=generator, dtype=torch.bfloat16) for name in names
    }
    save_file(matrices, directory / "model.safetensors", {"format": "pt"})
    return TargetSpec(str(directory), dtype="bfloat16")
