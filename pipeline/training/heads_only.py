"""Heads alone, from cached hidden states: the backbone is never run (Medusa-1, paper 2.2.1).

The loss is the sum over heads of 0.8^(k+1) CE_k, each CE over the labels of the whole batch: a
share of it is that with the target's own distributions (`train.soft_labels`), whose states lie in
the same cache.

Letters: N positions, D hidden size, V vocabulary, K heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.artifacts.feature_rows import FeatureRows
from pipeline.artifacts.generated_rows import read_token_rows
from pipeline.artifacts.trained_heads import read_trained_heads
from pipeline.config import TrainConfig
from pipeline.errors import ConfigError, DataError
from pipeline.heads.kind import Heads, TargetWeights, most_frequent
from pipeline.heads.losses import TargetHead, Teacher
from pipeline.targets.lm_head import read_embedding, read_lm_head, read_logit_changes
from pipeline.training.epoch_plan import EpochPlan
from pipeline.training.evaluation import MAX_POSITIONS, SPLIT, evaluate
from pipeline.training.feature_batches import Batch, load_batches
from pipeline.training.input_noise import noisy
from pipeline.training.learner import Learner
from pipeline.training.recipe import Recipe, heads_recipe
from pipeline.training.task import TrainSpec, Workers, product_dtype


class HeadsLearner(Learner):
    """Heads of any kind, from the features stage's shards.

    Raises:
        ConfigError: The target's lm_head has another size than its configuration says.
        DataError: A shard is damaged or of another run or target, or there is nothing to learn.
    """

    saves_memory = ("train.optimizer: adamw-8bit", "a smaller train.batch_tokens")

    def __init__(
        self,
        spec: TrainSpec,
        workers: Workers,
        device: torch.device,
        heads_from: Path | None = None,
    ):
        super().__init__(spec, workers, device, heads_from)
        self.rows = open_features(spec)
        self.recipe = recipe_of(spec, self.rows)
        self.held_out_share = min(num_positions(self.rows, SPLIT), MAX_POSITIONS) / num_positions(
            self.rows
        )
        self.heads = initial_heads(spec, heads_from).to(device)
        self.modules, self.peak_lrs = {"heads": self.heads}, {"heads": self.recipe.lr}
        self.target_head = read_target_head(spec, device) if spec.settings.soft_labels else None

    @classmethod
    def recipe_of(cls, spec: TrainSpec) -> Recipe:
        return recipe_of(spec, open_features(spec))

    @classmethod
    def expected_recipe(
        cls, settings: TrainConfig, positions: int, hidden_size: int, lr_scale: float
    ) -> Recipe:
        return heads_recipe(settings, positions, hidden_size, lr_scale)

    def steps(self, first: int) -> Iterator[Sequence[Batch]]:
        workers = self.workers
        while first < self.total_steps:
            epoch, start = divmod(first, self.steps_per_epoch)
            steps = range(start, self.steps_per_epoch)
            shares = {"rank": workers.rank, "world_size": workers.world_size}
            plan = EpochPlan(
                self.rows.lengths("train"),
                batch_tokens=self.recipe.batch_tokens,
                seed=self.spec.seed,
                epoch=epoch,
            )
            soft_labels = self.target_head is not None
            batches = load_batches(
                self.rows, plan, steps, **shares, device=self.device, soft_labels=soft_labels
            )
            for step, batch in zip(steps, batches, strict=True):
                # The step within the whole training, and the share's place within the step: any
                # worker draws the same.
                seed, place = (self.spec.seed, first + step - start), plan.first(step, **shares)
                hidden_ND = noisy(batch.hidden_ND, self.spec.settings.noise, seed, place)
                yield [replace(batch, hidden_ND=hidden_ND)]
            first += len(steps)

    def label_counts(self, batches: Sequence[Batch]) -> Tensor:
        (batch,) = batches
        return self.heads.vocabulary.num_learned(batch.labels_KN)

    def loss_weights(self, step: int) -> Tensor:
        return head_weights(self.spec, self.device)

    def summed_losses(self, batch: Batch, weights_C: Tensor) -> Tensor:
        teacher, share = None, self.spec.settings.soft_labels
        if self.target_head and batch.teacher_MD is not None and batch.teacher_KN is not None:
            teacher = Teacher(self.target_head, batch.teacher_MD, batch.teacher_KN, share)
        with self.autocast():
            return self.heads.summed_losses(
                batch.hidden_ND, batch.next_N, batch.labels_KN, teacher, weights_C
            )

    def figures(self, step: int, means: list[float]) -> dict[str, Any]:
        return {"head_losses": means}

    def evaluate(self) -> dict[str, Any]:
        dtype, size = product_dtype(self.spec, self.device), self.recipe.batch_tokens
        return evaluate(self.heads, self.rows, self.workers, batch_tokens=size, dtype=dtype)


def recipe_of(spec: TrainSpec, rows: FeatureRows) -> Recipe:
    return heads_recipe(spec.settings, num_positions(rows), spec.hidden_size, spec.kind.lr_scale)


def num_positions(rows: FeatureRows, split: str = "train") -> int:
    """Positions of a split with something to learn."""
    return sum(int(lengths.sum()) for lengths in rows.lengths(split))


def open_features(spec: TrainSpec) -> FeatureRows:
    """The cached states, checked against the run and the target; raises DataError."""
    rows = FeatureRows(
        spec.shards,
        fingerprint=spec.fingerprint,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        num_heads=spec.settings.num_heads,
        roles=spec.settings.roles,
    )
    if not num_positions(rows):
        what = (
            "No train row has target-written text of two tokens or more in the roles"
            f" {spec.settings.roles}."
        )
        raise DataError(
            what, "train.roles", "Generate more or longer answers, or learn from other roles."
        )
    return rows


def initial_heads(spec: TrainSpec, heads_from: Path | None = None) -> Heads:
    """The heads in this file, else untrained ones of the kind that is asked for; in fp32 on the
    CPU.
    """
    if heads_from:
        return read_trained_heads(heads_from)

    target = TargetWeights(
        lambda: _of_the_right_size("lm_head", read_lm_head(spec.target), spec).float(),
        lambda: _of_the_right_size("embedding", read_embedding(spec.target), spec).float(),
    )
    shape = spec.heads_shape
    if not shape.is_pruned:
        return spec.kind.initial(shape, target)
    tokens_V = most_frequent(_count_written_tokens(spec), shape.vocab_size)
    heads = spec.kind.initial(shape, target.drafting(tokens_V))
    heads.vocabulary.fill(tokens_V)
    return heads


def _count_written_tokens(spec: TrainSpec) -> npt.NDArray[np.int64]:
    """How often the target wrote each token in the train rows' learned roles, whatever the shards'
    order; [V].
    """
    cached = spec.shards, spec.fingerprint
    shards, fingerprint = cached if spec.shards else (spec.texts, spec.texts_fingerprint)
    counts_V = np.zeros(spec.vocab_size, np.int64)
    for row in read_token_rows(shards, fingerprint, spec.vocab_size):
        for span in row.spans if row.split == "train" else ():
            if span.role in spec.settings.roles:
                np.add.at(counts_V, row.input_ids[span.start : span.end], 1)
    return counts_V


def read_target_head(spec: TrainSpec, device: torch.device) -> TargetHead:
    """What turns the target's states into its own predictions, in the dtype of the products."""
    weight_VD = _of_the_right_size("lm_head", read_lm_head(spec.target), spec)
    return TargetHead(weight_VD, *read_logit_changes(spec.target)).to(
        device, product_dtype(spec, device)
    )


def _of_the_right_size(name: str, matrix_VD: Tensor, spec: TrainSpec) -> Tensor:
    if matrix_VD.shape != (spec.vocab_size, spec.hidden_size):
        found, said = (
            " x ".join(map(str, matrix_VD.shape)),
            f"{spec.vocab_size} x {spec.hidden_size}",
        )
        what = f"The target's {name} is {found}, its configuration says {said}."
        raise ConfigError(
            what, spec.target.model, "Check the target's config.json against its weights."
        )
    return matrix_VD


def head_weights(spec: TrainSpec, device: torch.device) -> Tensor:
    """What head k's loss weighs: decay^(k+1), [K]."""
    return spec.settings.decay ** torch.arange(1, spec.settings.num_heads + 1, device=device)
