"""Benchmark of training heads from cached features over training with the backbone in each step.

Claim: training from the cache is at least twice as fast.

Measured: positions learned per second in `train` from a feature cache, waiting for data included.
Against: a loop that, as the reference implementation does, runs the frozen backbone over each
step's conversations and learns from its states: same heads, optimizer and batches, as the losses of
the steps show (`largest_loss_difference`). Rows are of one length, so that the online loop pads
nothing and each batch holds whole rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks import rows, targets
from benchmarks.claims import Claim, Result, in_turns, speed_ratio
from pipeline.artifacts.generated_rows import spans_of
from pipeline.config import FeaturesConfig, TrainConfig
from pipeline.conversations.spans import IGNORED, feature_positions, head_labels
from pipeline.stages.features import Worker
from pipeline.targets.loading import load_causal_lm
from pipeline.targets.spec import TargetSpec, model_config
from pipeline.training.feature_batches import LANES, Batch, EpochPlan
from pipeline.training.heads_only import HeadsLearner, open_features
from pipeline.training.metrics import read_metrics
from pipeline.training.task import TrainSpec, Workers
from pipeline.training.trainer import Trainer, train

AIM = 2.0
ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """A training of `num_steps` steps, each of `LANES` rows with `num_turns` turns."""

    what: str
    target: TargetSpec
    num_heads: int
    num_steps: int
    num_turns: int
    turn_tokens: int
    aim: float | None = None


def measure(*, tiny: bool = False) -> Result:
    """Measure a random backbone of 50M parameters and the demo's target.

    The claim is about the former.
    """
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        large = targets.random_target(
            directory / "large", targets.TINY if tiny else targets.BACKBONE
        )
        demo = targets.demo_target(directory / "demo")
        cases = [
            Case(
                "a random backbone of 50M parameters, 5 heads",
                large,
                5,
                *((2, 1, 32) if tiny else (3, 2, 128)),
                AIM,
            ),
            Case(
                "the demo's target and batch, 5 heads",
                demo,
                5,
                *((2, 1, 32) if tiny else (40, 1, 86)),
            ),
        ]
        claims, facts = zip(*(_measured(case, directory) for case in cases), strict=True)
    return Result(claims, {"written_share": rows.WRITTEN_SHARE, "cases": facts})


def _measured(case: Case, directory: Path) -> tuple[Claim, dict[str, Any]]:
    vocab_size = model_config(case.target).get_text_config().vocab_size
    # As many rows per step as the plan has lanes, all of one length: batches are whole rows.
    made = rows.equal_rows(LANES * case.num_steps, case.num_turns, case.turn_tokens, vocab_size)
    with tempfile.TemporaryDirectory(dir=directory) as place:
        (task,) = rows.features_tasks(Path(place), [made])
        Worker(case.target, FeaturesConfig(tokens_per_batch=4096), gpus=0)(task)
        per_row = int(
            (
                head_labels(made[0]["input_ids"], spans_of(made[0]["spans"]), 1, rows.ROLES)
                != IGNORED
            ).sum()
        )
        sizes = {"num_heads": case.num_heads, "batch_tokens": LANES * per_row}
        settings = TrainConfig(heads="medusa", **sizes, epochs=1, warmup_steps=0, soft_labels=0.0)
        spec = rows.train_spec(case.target, settings, Path(place), [task], torch.device("cpu"))
        cached, online = CachedLoop(spec, Path(place)), OnlineLoop(spec, made)
        # No warm-up: every run starts with new heads and a new optimizer.
        seconds = in_turns(
            {"from the cache": cached.run, "online": online.run}, ROUNDS, warm_up=False
        )
    difference = max(
        abs(ours - theirs) for ours, theirs in zip(cached.losses, online.losses, strict=True)
    )
    facts = {
        "case": case.what,
        "layer_parameters": sum(each.numel() for each in online.backbone.layers.parameters()),
        "steps": case.num_steps,
        "batch_positions": LANES * per_row,
        "row_tokens": case.num_turns * case.turn_tokens,
        "largest_loss_difference": difference,
    }
    what = f"from the cache over online, {case.what}"
    return speed_ratio(what, seconds, per_row * len(made), "positions", case.aim), facts


class CachedLoop:
    """The project's training of heads from cached features, each time in a new directory."""

    def __init__(self, spec: TrainSpec, directory: Path):
        self.spec = spec
        self.losses: list[float] = []
        self._directories = (directory / f"train-{number}" for number in count())

    def run(self) -> float:
        directory = next(self._directories)
        directory.mkdir()
        result = train(replace(self.spec, directory=str(directory)))
        self.losses = [line["loss"] for line in read_metrics(directory) if "loss" in line]
        return result.seconds


class OnlineLoop:
    """The same training steps with the backbone in memory, which computes each step's states."""

    def __init__(self, spec: TrainSpec, made: Sequence[rows.Row]):
        self.spec, self.rows = spec, made
        self.backbone = load_causal_lm(spec.target).base_model
        self.losses: list[float] = []
        lengths = open_features(spec).lengths("train")
        self._first_row = np.cumsum([0, *map(len, lengths)])  # of each row group
        self._plan = EpochPlan(lengths, batch_tokens=spec.settings.batch_tokens, seed=spec.seed)

    def run(self) -> float:
        spec, num_steps = self.spec, self._plan.num_steps
        trainer = Trainer(HeadsLearner(spec, Workers(), torch.device("cpu")))
        self.losses = []
        started = perf_counter()
        for step in range(num_steps):
            self.losses.append(trainer.step(step, [self._batch(step)]).loss)
        return perf_counter() - started

    @torch.no_grad()
    def _batch(self, step: int) -> Batch:
        """Compute a step's batch by the backbone: states and labels at the learned positions."""
        chosen = [
            self.rows[self._first_row[piece.group] + piece.row] for piece in self._plan.pieces(step)
        ]
        hidden_BTD = self.backbone(
            input_ids=torch.tensor([row["input_ids"] for row in chosen]), use_cache=False
        ).last_hidden_state
        states, following, labels = zip(*map(self._learned, hidden_BTD, chosen), strict=True)
        hidden_ND, next_N, labels_KN = torch.cat(states), torch.cat(following), torch.cat(labels, 1)
        return Batch(hidden_ND, next_N, labels_KN, torch.empty(0), torch.empty(0))

    def _learned(self, hidden_TD: torch.Tensor, row: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        settings, spans = self.spec.settings, spans_of(row["spans"])
        labels_KN = head_labels(row["input_ids"], spans, settings.num_heads, settings.roles)
        learnable = labels_KN[0] != IGNORED
        positions_N = torch.from_numpy(feature_positions(spans)[learnable]).long()
        next_N = torch.tensor(row["input_ids"])[positions_N + 1]
        return hidden_TD[positions_N], next_N, torch.from_numpy(labels_KN[:, learnable]).long()
