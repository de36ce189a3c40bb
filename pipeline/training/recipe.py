"""The recipe of a training: epochs, learning rate, batch and warmup, where `train` leaves them
`auto`.

The rule, with its evidence in docs/recipes-and-methods.md and `python -m benchmarks.run recipe`:

- Epochs are the paper's two from 4 million positions on (MANY_STEPS / 2 of its batches), else as
  many as make MANY_STEPS such batches, at most MAX_EPOCHS.
- A batch is the power of two that comes nearest to MANY_STEPS steps, at most the paper's 16,384
  positions (of Medusa-2 its 128 sequences) and at least MIN_BATCH: smaller ones cost time and gain
  nothing.
- The learning rate is the paper's 1e-3 at its width, D = 4,096, times the square root of how much
  narrower the target is, times what the kind of heads says of itself (`Heads.lr_scale`).
- Warmup is a tenth of the steps, at most the paper's 40.

What is given explicitly stays as it is, and the rest is chosen to fit it. The rule is a function of
counts alone, so that every worker and every resume agree. Raise `VERSION` when it changes: it is
part of the fingerprint of what is trained by it. Importing this module does not import torch.

Source: the paper's settings are those of appendix B, for 100,000 conversations and targets of 7B
    and more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.config import TrainConfig

VERSION = 2

PAPER_BATCH, PAPER_SEQUENCES, PAPER_EPOCHS, PAPER_LR, PAPER_WARMUP, PAPER_WIDTH = (
    16_384,
    128,
    2,
    1e-3,
    40,
    4096,
)
MIN_BATCH = 128
MAX_EPOCHS = 4
MANY_STEPS = 500  # the paper's own 9,800 and less
FEW_STEPS = 40  # heads of fewer guess hardly better than untrained ones
EVALUATIONS = 10  # of a training
EVALUATION_SHARE = 0.2  # evaluated positions over learned ones; a look costs a third of a lesson

AUTO_KEYS = ("epochs", "lr", "batch_tokens", "warmup_steps")


@dataclass(frozen=True)
class Recipe:
    """What one training does, in plain numbers."""

    epochs: int
    lr: float  # peak, of the heads
    warmup_steps: int
    steps_per_epoch: int
    batch_tokens: int  # positions per step; an average where steps are of packed sequences
    batch_sequences: int | None = None

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    def described(self) -> str:
        """In words: `4 epochs of 146 steps, …`."""
        epochs = (
            f"{self.epochs:,} epoch{'s' if self.epochs > 1 else ''} of {self.steps_per_epoch:,}"
            " steps"
        )
        return f"{epochs}, {self.batch_tokens:,} positions each; peak learning rate {self.lr:.2g}"

    def evaluations_per_epoch(self, held_out_share: float) -> int:
        """As many as make EVALUATIONS in the whole training, where that costs little.

        Args:
            held_out_share: The positions of one evaluation over those of an epoch.
        """
        wanted = -(-EVALUATIONS // self.epochs)
        affordable = int(EVALUATION_SHARE / held_out_share) if held_out_share else 1
        return max(1, min(wanted, affordable, self.steps_per_epoch))

    def facts(self) -> dict[str, Any]:
        """As the summary and report.json have it."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def heads_recipe(
    train: TrainConfig, positions: int, hidden_size: int, lr_scale: float = 1.0
) -> Recipe:
    """The recipe of heads alone, learned from so many cached positions of a target of this width.

    `lr_scale` is the kind's: see `Heads.lr_scale`.
    """
    epochs = _epochs(train, positions, PAPER_BATCH)
    batch = train.batch_tokens
    if isinstance(batch, str):
        batch = _batch(positions * epochs, MIN_BATCH, PAPER_BATCH)
    steps = -(-positions // batch)
    return Recipe(
        epochs, _lr(train, hidden_size, lr_scale), _warmup(train, steps * epochs), steps, batch
    )


def backbone_recipe(
    train: TrainConfig, sequences: int, positions: int, hidden_size: int, lr_scale: float = 1.0
) -> Recipe:
    """The recipe of heads and backbone together, from so many packed sequences with so many
    positions to learn.
    """
    epochs = _epochs(train, sequences, PAPER_SEQUENCES)
    batch = train.backbone.batch_sequences
    if isinstance(batch, str):
        batch = _batch(sequences * epochs, 1, PAPER_SEQUENCES)
    steps = -(-sequences // batch)
    lr, warmup = _lr(train, hidden_size, lr_scale), _warmup(train, steps * epochs)
    return Recipe(
        epochs, lr, warmup, steps, batch_tokens=-(-positions // steps), batch_sequences=batch
    )


def _epochs(train: TrainConfig, number: int, most: int) -> int:
    """As many as make MANY_STEPS steps of `most` positions or sequences each, within bounds."""
    enough = math.ceil(MANY_STEPS * most / number)
    return (
        min(MAX_EPOCHS, max(PAPER_EPOCHS, enough))
        if isinstance(train.epochs, str)
        else train.epochs
    )


def _batch(learned: int, least: int, most: int) -> int:
    """The power of two that comes nearest to MANY_STEPS steps where so much is learned in all
    epochs.
    """
    return min(most, max(least, 2 ** round(math.log2(max(1.0, learned / MANY_STEPS)))))


def _lr(train: TrainConfig, hidden_size: int, lr_scale: float) -> float:
    usual = PAPER_LR * math.sqrt(PAPER_WIDTH / hidden_size) * lr_scale
    return usual if isinstance(train.lr, str) else train.lr


def _warmup(train: TrainConfig, steps: int) -> int:
    return (
        min(PAPER_WARMUP, steps // 10)
        if isinstance(train.warmup_steps, str)
        else train.warmup_steps
    )


def uses_rule(settings: Mapping[str, Any]) -> bool:
    """Whether any of these settings of `train`, as plain data, is chosen by the rule."""
    chosen = [settings.get(key) for key in AUTO_KEYS]
    return "auto" in [*chosen, (settings.get("backbone") or {}).get("batch_sequences")]


def few_steps(recipes: Sequence[Recipe]) -> str | None:
    """What to say, and to do, where a training has so few steps that its heads learn nothing; else
    None.
    """
    fewest = min(recipes, key=lambda recipe: recipe.total_steps)
    if fewest.total_steps >= FEW_STEPS:
        return None
    ways = ["give more seeds", f"raise train.epochs from {fewest.epochs}"]
    if fewest.batch_tokens > MIN_BATCH:
        settings = "train.batch_tokens, or of Medusa-2 train.backbone.batch_sequences"
        ways.append(f"take smaller batches than {fewest.batch_tokens:,} positions ({settings})")
    return (
        f"{fewest.total_steps:,} optimizer steps are too few: heads of less than {FEW_STEPS} guess"
        f" hardly better than untrained ones. What helps: {', or '.join(ways)}."
    )
