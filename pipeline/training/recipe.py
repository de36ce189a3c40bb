"""Training recipe: resolves `auto` for epochs, learning rate, batch size and warmup.

The rule, with its evidence in docs/training.md and `python -m benchmarks.run recipe`:

- Epochs: as many as read ENOUGH_POSITIONS, at least the paper's 2 and at most MAX_EPOCHS. From 4
  million positions on it is 2. For Medusa-2, whose epochs cost several times as much, at most
  MAX_BACKBONE_EPOCHS.
- Batch size: the power of two that gives a number of steps nearest to MANY_STEPS, at least
  MIN_BATCH and at most the paper's 16,384 positions. For Medusa-2 it is at least one sequence and
  at most the paper's 128.
- Packing (Medusa-2): as many tokens in a sequence as give MANY_STEPS steps of one sequence, at
  least MIN_PACKED_TOKENS and at most `train.backbone.sequence_length`.
- A kind's `Heads.batch_scale` divides MANY_STEPS, and multiplies MIN_BATCH and MIN_PACKED_TOKENS.
- Learning rate: the paper's 1e-3 at D = 4,096, times sqrt(4,096 / D), times the kind's
  `Heads.lr_scale`. In the second stage of two-stage Medusa-2, SECOND_STAGE_LR of that.
- Warmup: a tenth of the steps, at most the paper's 40.

Explicit settings are kept, and the other values are computed from them. The rule depends only on
counts and the kind of heads, so that every worker and every resume agree. Raise `VERSION` when the
rule changes: it is part of every training's fingerprint. Importing this module does not import
torch.

The paper's settings are in its appendix B, for 100,000 conversations and targets of 7B and more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config import TrainConfig

if TYPE_CHECKING:
    from pipeline.heads.kind import Heads

VERSION = 6

PAPER_BATCH = 16_384
PAPER_SEQUENCES = 128
PAPER_EPOCHS = 2
PAPER_LR = 1e-3
PAPER_WARMUP = 40
PAPER_WIDTH = 4096
MIN_BATCH = 128
MIN_PACKED_TOKENS = 256
MAX_EPOCHS = 8
MAX_BACKBONE_EPOCHS = 4
SECOND_STAGE_LR = 0.25  # the heads are trained already
MANY_STEPS = 500  # the paper has 9,800 or fewer
ENOUGH_POSITIONS = 8_000_000  # over all epochs
FEW_STEPS = 40  # with fewer steps, heads guess hardly better than untrained heads
EVALUATIONS = 10  # per training
EVALUATION_SHARE = 0.2  # evaluated over trained positions, at most; evaluation is 3 times as fast


@dataclass(frozen=True)
class Recipe:
    """Epochs, learning rate, warmup and batch size of one training, with `auto` resolved."""

    epochs: int
    lr: float  # peak, of the heads
    warmup_steps: int
    steps_per_epoch: int
    batch_tokens: int  # positions per step; the average for packed sequences and whole rows
    batch_sequences: int | None = None

    @property
    def total_steps(self) -> int:
        """The number of training steps over all epochs."""
        return self.steps_per_epoch * self.epochs

    def describe(self) -> str:
        """Return the training recipe in words: `4 epochs of 146 steps, …`."""
        epochs = "epoch" if self.epochs == 1 else "epochs"
        steps = "step" if self.steps_per_epoch == 1 else "steps"
        return (
            f"{self.epochs:,} {epochs} of {self.steps_per_epoch:,} {steps}, {self.batch_tokens:,}"
            f" positions each; peak learning rate {self.lr:.2g}"
        )

    def evaluates_after(self, step: int, held_out_share: float) -> bool:
        """Return whether a held-out evaluation follows this training step.

        Evaluations are at the end of each epoch and at equal intervals within it. The whole
        training has about EVALUATIONS of them: fewer if they would exceed EVALUATION_SHARE of the
        positions, more if there are more epochs.

        Args:
            step: The number of finished steps, at least 1.
            held_out_share: Positions of one evaluation over positions of one epoch; 0 if nothing
                is held out.
        """
        parts = 1
        if held_out_share:
            parts = min(-(-EVALUATIONS // self.epochs), int(EVALUATION_SHARE / held_out_share))
        parts = max(1, min(parts, self.steps_per_epoch))
        done = step % self.steps_per_epoch
        before = (done - 1) * parts // self.steps_per_epoch
        return done == 0 or done * parts // self.steps_per_epoch > before


def make_recipe(
    train: TrainConfig,
    positions: int,
    hidden_size: int,
    kind: type[Heads],
    sequences: int | None = None,
    rows: int | None = None,
) -> Recipe:
    """Resolve `auto` in the training settings.

    Args:
        train: The settings.
        positions: The number of positions that one epoch learns from.
        hidden_size: The target's hidden size.
        kind: The kind of heads, for its `lr_scale` and `batch_scale`.
        sequences: The number of packed sequences for Medusa-2; None for heads alone.
        rows: The number of rows for a kind with `row_layers`, whose batches are whole rows.
    """
    items = positions
    given_batch = train.batch_tokens
    least = round(MIN_BATCH * kind.batch_scale)
    most = PAPER_BATCH
    lr_scale = kind.lr_scale
    most_epochs = MAX_EPOCHS
    if sequences is not None:
        items = sequences
        given_batch = train.backbone.batch_sequences
        least = 1
        most = PAPER_SEQUENCES
        most_epochs = MAX_BACKBONE_EPOCHS
        if train.backbone.recipe == "two-stage":
            lr_scale *= SECOND_STAGE_LR
    epochs = num_epochs(train, positions, most_epochs)
    if isinstance(given_batch, str):
        items_per_step = kind.batch_scale * items * epochs / MANY_STEPS
        nearest = 2 ** round(math.log2(max(1.0, items_per_step)))
        batch = min(most, max(least, nearest))
    else:
        batch = given_batch
    if rows is not None:
        batch = max(batch, -(-positions // rows))  # every step has a row
    steps = -(-items // batch)
    if isinstance(train.warmup_steps, str):
        warmup_steps = min(PAPER_WARMUP, steps * epochs // 10)
    else:
        warmup_steps = train.warmup_steps
    if isinstance(train.lr, str):
        lr = PAPER_LR * math.sqrt(PAPER_WIDTH / hidden_size) * lr_scale
    else:
        lr = train.lr
    if sequences is None:
        return Recipe(epochs, lr, warmup_steps, steps, batch)
    return Recipe(epochs, lr, warmup_steps, steps, -(-positions // steps), batch)


def num_epochs(train: TrainConfig, positions: int, most: int) -> int:
    """Return the number of training epochs; with `auto`, at most `most`, for few positions."""
    if not isinstance(train.epochs, str):
        return train.epochs
    return max(PAPER_EPOCHS, min(most, math.ceil(ENOUGH_POSITIONS / positions)))


def packed_length(train: TrainConfig, positions: int, tokens: int, kind: type[Heads]) -> int:
    """Return the number of tokens up to which Medusa-2 packs conversations into a sequence.

    Args:
        train, positions, kind: As in `make_recipe`.
        tokens: The number of tokens of all conversations, prompts included.
    """
    backbone = train.backbone
    if isinstance(backbone.packed_tokens, str):
        epochs = num_epochs(train, positions, MAX_BACKBONE_EPOCHS)
        least = kind.batch_scale * MIN_PACKED_TOKENS
        tokens_per_step = kind.batch_scale * tokens * epochs / MANY_STEPS
        packed_tokens = math.ceil(max(least, tokens_per_step))
    else:
        packed_tokens = backbone.packed_tokens
    return min(packed_tokens, backbone.sequence_length)


def too_few_steps(recipes: Sequence[Recipe]) -> str | None:
    """Return a warning if a training phase has too few steps for useful heads, or None."""
    fewest = min(recipe.total_steps for recipe in recipes)
    if fewest >= FEW_STEPS:
        return None
    return (
        f"Too few optimizer steps ({fewest:,}): with fewer than {FEW_STEPS}, heads guess hardly"
        " better than untrained ones. What helps: more seeds, a higher train.epochs, or smaller"
        " batches (train.batch_tokens, of Medusa-2 train.backbone.batch_sequences)."
    )
