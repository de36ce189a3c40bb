"""A training shared by two workers: this process and another one, which meet over gloo."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from pipeline.training.task import TrainSpec
from pipeline.training.world import World

PATIENCE = timedelta(seconds=120)  # with the other, should it run less than this one
ROOT = Path(__file__).parents[2]
SECOND = """
import pickle, sys, torch.distributed as dist
from pipeline.training.world import World
from tests.training.two_workers import PATIENCE
dist.init_process_group("gloo", init_method=sys.argv[2], timeout=PATIENCE, rank=1, world_size=2)
with open(sys.argv[1], "rb") as file:
    train, spec = pickle.load(file)
train(spec, World(1, 2))
dist.destroy_process_group()
"""


def train_as_two(train: Callable[..., Any], spec: TrainSpec | tuple[TrainSpec, ...], scratch: Path) -> None:
    """Train as the first of two workers; the second has to end well too."""
    work, meeting = scratch / "work.pickle", f"file://{scratch}/meeting"
    work.write_bytes(pickle.dumps((train, spec)))
    other = subprocess.Popen([sys.executable, "-c", SECOND, work, meeting], cwd=ROOT)
    try:
        torch.distributed.init_process_group("gloo", init_method=meeting, timeout=PATIENCE, rank=0, world_size=2)
        train(spec, World(0, 2))
    finally:
        torch.distributed.destroy_process_group()
        try:
            assert other.wait(60) == 0
        finally:
            other.kill()
