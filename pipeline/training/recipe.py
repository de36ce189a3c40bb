"""The recipe of a training: epochs, learning rate, batch and warmup, where `train` leaves them `auto`.

The rule, with its evidence in docs/recipes-and-methods.md and `python -m benchmarks.run recipe`:

- A batch is the paper's 16,384 positions where that leaves MANY_STEPS steps in two epochs; of less data, the power of
  two that comes nearest to leaving so many, but no less than MIN_BATCH: smaller ones cost time and gain nothing.
- Epochs are the paper's two where they leave MANY_STEPS steps, else as many as do, at most MAX_EPOCHS.
- The learning rate is the paper's 1e-3 at its width, D = 4,096, times the square root of how much narrower the target
  is.
- Warmup is a tenth of the steps, at most the paper's 40.

What is given explicitly stays as it is, and the rest is chosen to fit it. The rule is a function of counts alone, so
that every worker and every resume agree. Raise `VERSION` when it changes: it is part of the fingerprint of what is
trained by it. Importing this module does not import torch.

Source: the paper's settings are those of appendix B, for 100,000 conversations and targets of 7B and more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.config import TrainConfig

VERSION = 1

PAPER_BATCH, PAPER_EPOCHS, PAPER_LR, PAPER_WARMUP, PAPER_WIDTH = 16_384, 2, 1e-3, 40, 4096
MIN_BATCH = 128
MAX_EPOCHS = 4
MANY_STEPS = 500  # the paper's own 9,800 and less
FEW_STEPS = 60  # heads of fewer guess hardly better than untrained ones
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

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    def described(self) -> str:
        """In words: `4 epochs of 146 steps, …`."""
        epochs = f"{self.epochs:,} epoch{'s' if self.epochs > 1 else ''} of {self.steps_per_epoch:,} steps"
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
        return asdict(self)


def heads_recipe(train: TrainConfig, positions: int, hidden_size: int) -> Recipe:
    """The recipe of heads alone, learned from so many cached positions of a target of this width."""
    batch = _batch(train, positions) if isinstance(train.batch_tokens, str) else train.batch_tokens
    return _recipe(train, -(-positions // batch), batch, hidden_size)


def backbone_recipe(train: TrainConfig, steps_per_epoch: int, positions: int, hidden_size: int) -> Recipe:
    """The recipe of heads and backbone together, whose steps are packed sequences."""
    return _recipe(train, steps_per_epoch, -(-positions // steps_per_epoch), hidden_size)


def _batch(train: TrainConfig, positions: int) -> int:
    epochs = MAX_EPOCHS if isinstance(train.epochs, str) else train.epochs
    enough = max(1.0, positions * epochs / MANY_STEPS)
    return min(PAPER_BATCH, max(MIN_BATCH, 2 ** round(math.log2(enough))))


def _recipe(train: TrainConfig, steps_per_epoch: int, batch: int, hidden_size: int) -> Recipe:
    enough = math.ceil(MANY_STEPS / steps_per_epoch)
    epochs = min(MAX_EPOCHS, max(PAPER_EPOCHS, enough)) if isinstance(train.epochs, str) else train.epochs
    a_tenth = steps_per_epoch * epochs // 10
    warmup = min(PAPER_WARMUP, a_tenth) if isinstance(train.warmup_steps, str) else train.warmup_steps
    lr = PAPER_LR * math.sqrt(PAPER_WIDTH / hidden_size) if isinstance(train.lr, str) else train.lr
    return Recipe(epochs, lr, warmup, steps_per_epoch, batch)


def few_steps(recipes: Sequence[Recipe]) -> str | None:
    """What to say, and to do, where a training has so few steps that its heads learn nothing; else None."""
    fewest = min(recipes, key=lambda recipe: recipe.total_steps)
    if fewest.total_steps >= FEW_STEPS:
        return None
    return (
        f"{fewest.total_steps:,} optimizer steps are too few: heads of less than {FEW_STEPS} guess hardly better than "
        f"untrained ones. Give more seeds, raise train.epochs from {fewest.epochs}, or take smaller batches than "
        f"{fewest.batch_tokens:,} positions: train.batch_tokens, or of Medusa-2 train.backbone.batch_sequences."
    )
