"""A training shared by two workers: this process and another one, which meet over gloo."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from pipeline.training.task import TrainSpec, Workers
from tests.forks import FORKS

Specs = TrainSpec | tuple[TrainSpec, ...]
PATIENCE = timedelta(seconds=120)  # with the other, should it run less than this one


def train_as_two(train: Callable[..., Any], spec: Specs, scratch: Path) -> None:
    """Train as the first of two workers; the second has to end well too."""
    meeting = f"file://{scratch}/meeting"
    other = FORKS.Process(target=_train_as_one_of_two, args=(train, spec, 1, meeting))
    other.start()
    try:
        _train_as_one_of_two(train, spec, 0, meeting)
    finally:
        other.join(60)
        ended, _ = other.exitcode, other.kill()
        assert ended == 0


def _train_as_one_of_two(train: Callable[..., Any], spec: Specs, rank: int, meeting: str) -> None:
    distributed.init_process_group(
        "gloo", init_method=meeting, timeout=PATIENCE, rank=rank, world_size=2
    )
    try:
        train(spec, Workers(rank, 2))
    finally:
        distributed.destroy_process_group()
