"""Medusa-1: train heads alone from cached hidden states, without the backbone (paper 2.2.1).

The loss is the sum over heads of decay^(k+1) CE_k (`train.decay`, 0.8 in the paper); each CE_k is a
mean over the batch's labels. With soft labels (`train.soft_labels`), a share of CE_k is the cross
entropy with the target's own distribution, computed from the same cached hidden states.

Letters: N positions, D hidden size, V vocabulary, K heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.artifacts.feature_rows import FeatureRows
from pipeline.artifacts.generated_rows import read_token_rows
from pipeline.artifacts.row_states import RowStates
from pipeline.artifacts.trained_heads import read_trained_heads
from pipeline.errors import DataError
from pipeline.heads.accuracy import Score, score_guesses
from pipeline.heads.kind import Heads, TargetWeights, most_frequent_tokens
from pipeline.heads.losses import TargetHead, Teacher
from pipeline.heads.rows import Rows
from pipeline.targets.lm_head import read_embedding, read_lm_head, read_logit_changes
from pipeline.training.feature_batches import Batch, EpochPlan, load_batches
from pipeline.training.held_out_accuracy import (
    MAX_POSITIONS,
    SPLIT,
    TOP,
    Evaluation,
    summarize_scores,
)
from pipeline.training.recipe import Recipe
from pipeline.training.row_batches import RowPlan
from pipeline.training.task import Learner, StepMetrics, TrainSpec, Workers

EVALUATION_BATCH = 1_024  # positions, at least


class HeadsLearner(Learner):
    """Learner of Medusa-1: heads alone, from the features stage's cached hidden states."""

    saves_memory = ("train.optimizer: adamw-8bit", "a smaller train.batch_tokens")

    def __init__(self, spec: TrainSpec, workers: Workers, device: torch.device):
        super().__init__(spec, workers, device)
        self.rows = open_features(spec)
        self.recipe = recipe_for(spec, self.rows)
        evaluated = min(num_positions(self.rows, SPLIT), MAX_POSITIONS)
        self.held_out_share = evaluated / num_positions(self.rows)
        self.heads = initial_heads(spec).to(device)
        self.modules = {"heads": self.heads}
        self.peak_lrs = {"heads": self.recipe.lr}
        self.target_head: TargetHead | None = None
        if spec.settings.soft_labels:
            head = TargetHead(read_lm_head(spec.target), *read_logit_changes(spec.target))
            self.target_head = head.to(device, self.dtype)

    @classmethod
    def recipe_of(cls, spec: TrainSpec) -> Recipe:
        """Open the cached hidden states and return the recipe of Medusa-1 training.

        Raises DataError as `open_features` does.
        """
        return recipe_for(spec, open_features(spec))

    def plan(
        self, split: str, batch_tokens: int, seed: int, epoch: int = 0, limit: int | None = None
    ) -> EpochPlan | RowPlan:
        """Return the plan of an epoch: of whole rows if the heads read rows, else of positions."""
        plan_class = EpochPlan if self.rows.row_states is None else RowPlan
        return plan_class(
            self.rows.lengths(split), batch_tokens=batch_tokens, seed=seed, epoch=epoch, limit=limit
        )

    def steps(self, first: int) -> Iterator[Sequence[Batch]]:
        """Yield this worker's batch for each training step from `first` on, as a list of one.

        Noise of the size `train.noise` is added to the states.
        """
        seed = self.spec.seed
        soft_labels = self.spec.settings.soft_labels > 0
        first_epoch, start = divmod(first, self.recipe.steps_per_epoch)
        for epoch in range(first_epoch, self.recipe.epochs):
            plan = self.plan("train", self.recipe.batch_tokens, seed, epoch)
            steps = range(start, self.recipe.steps_per_epoch)
            start = 0
            batches = load_batches(
                self.rows, plan, steps, self.workers, self.device, soft_labels=soft_labels
            )
            for step, batch in zip(steps, batches, strict=True):
                seed_of_step = (seed, epoch * self.recipe.steps_per_epoch + step)
                yield [self.with_noise(batch, plan, step, seed_of_step)]

    def with_noise(
        self, batch: Batch, plan: EpochPlan | RowPlan, step: int, seed: tuple[int, ...]
    ) -> Batch:
        """Return a batch with noise of the size `train.noise` on the states that the heads read."""
        noise = self.spec.settings.noise
        first, _ = plan.share(step, self.workers)
        if isinstance(plan, EpochPlan):
            hidden_ND = add_noise(batch.hidden_ND, noise, seed, first, plan.size(step))
            return batch._replace(hidden_ND=hidden_ND)
        assert batch.rows is not None
        rows = add_noise_to_rows(batch.rows, noise, seed, first, self.spec.hidden_size)
        return batch._replace(rows=rows)

    def label_counts(self, batches: Sequence[Batch]) -> Tensor:
        """Count the labels of each head in this worker's batch, [K]."""
        (batch,) = batches
        return self.heads.vocabulary.num_learned(batch.labels_KN)

    def loss_weights(self, step: int) -> Tensor:
        """Return the weight of each head's loss, the same in every training step, [K]."""
        return head_weights(self.spec, self.device)

    def loss(self, batch: Batch, weights_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch's weighted loss and the sum of each head's losses [K].

        Soft labels are used if `train.soft_labels` is above 0.
        """
        teacher = None
        if self.target_head is not None:
            share = self.spec.settings.soft_labels
            teacher = Teacher(self.target_head, batch.teacher_MD, batch.teacher_KN, share)
        with self.autocast():
            return self.heads.weighted_loss(
                batch.hidden_ND, batch.next_N, batch.labels_KN, teacher, weights_C, batch.rows
            )

    def metrics(self, step: int, means: list[float]) -> StepMetrics:
        """Return the mean loss of each head, as `head_losses`."""
        return {"head_losses": means}

    def evaluate(self) -> Evaluation:
        """Evaluate the heads on at most `MAX_POSITIONS` held-out positions, over all workers.

        The evaluation is empty if nothing is held out.
        """
        size = max(self.recipe.batch_tokens, EVALUATION_BATCH)
        plan = self.plan(SPLIT, size, seed=0, limit=MAX_POSITIONS)
        total = Score.zero(self.heads.shape, TOP, self.device)
        steps = range(plan.num_steps)
        for batch in load_batches(self.rows, plan, steps, self.workers, self.device):
            with self.autocast():
                score = score_guesses(
                    self.heads, batch.hidden_ND, batch.next_N, batch.labels_KN, TOP, batch.rows
                )
            total.add(score)
        for sums in total:
            self.workers.sum_in_place(sums)
        return summarize_scores(total)


def num_positions(rows: FeatureRows, split: str = "train") -> int:
    """Count the positions with a label in one split of the cached states."""
    return sum(int(lengths.sum()) for lengths in rows.lengths(split))


def recipe_for(spec: TrainSpec, rows: FeatureRows) -> Recipe:
    """Return the recipe of training on these cached states."""
    num_rows = None
    if rows.row_states is not None:
        num_rows = sum(int(np.count_nonzero(lengths)) for lengths in rows.lengths("train"))
    return spec.recipe(num_positions(rows), rows=num_rows)


def open_features(spec: TrainSpec) -> FeatureRows:
    """Open the cached hidden states that Medusa-1 trains on.

    Raises DataError if a shard is damaged or belongs to another run, or if no training row has a
    position with a label.
    """
    layers = spec.heads_shape.row_layers
    row_states = None
    if layers:
        row_states = RowStates(spec.row_shards, fingerprint=spec.row_fingerprint, layers=layers)
    rows = FeatureRows(
        spec.shards,
        fingerprint=spec.fingerprint,
        num_heads=spec.settings.num_heads,
        roles=spec.settings.roles,
        row_states=row_states,
    )
    if not num_positions(rows):
        raise DataError(
            "No train row has target-written text of two tokens or more in the roles"
            f" {spec.settings.roles}.",
            "train.roles",
            "Generate more or longer answers, or learn from other roles.",
        )
    return rows


def initial_heads(spec: TrainSpec) -> Heads:
    """Return the heads that training starts from, in fp32 on the CPU.

    They are read from the previous phase, if there is one, and otherwise untrained.
    """
    if spec.heads_from:
        return read_trained_heads(spec.heads_from)
    target = TargetWeights(
        lambda: read_lm_head(spec.target).float(),
        lambda: read_embedding(spec.target).float(),
    )
    shape = spec.heads_shape
    if not shape.is_pruned:
        return spec.kind.initial(shape, target)
    tokens_V = most_frequent_tokens(_count_written_tokens(spec), shape.vocab_size)
    heads = spec.kind.initial(shape, target.drafting(tokens_V))
    heads.vocabulary.fill(tokens_V)
    return heads


def _count_written_tokens(spec: TrainSpec) -> npt.NDArray[np.int64]:
    """Count how often the target wrote each token in training rows, [V].

    Only spans in the learned roles count. The features stage's shards are read, or without them the
    generate stage's.
    """
    shards = spec.shards
    fingerprint = spec.fingerprint
    if not shards:
        shards = spec.texts
        fingerprint = spec.texts_fingerprint
    counts_V = np.zeros(spec.vocab_size, np.int64)
    for row in read_token_rows(shards, fingerprint, spec.vocab_size):
        for span in row.spans:
            if row.split == "train" and span.role in spec.settings.roles:
                np.add.at(counts_V, row.input_ids[span.start : span.end], 1)
    return counts_V


def head_weights(spec: TrainSpec, device: torch.device) -> Tensor:
    """Return the weight of each head's loss, decay^(k+1), [K] (`train.decay`)."""
    return spec.settings.decay ** torch.arange(1, spec.settings.num_heads + 1, device=device)


def add_noise(
    states_ND: Tensor, noise: float, seed: tuple[int, ...], first: int = 0, total: int | None = None
) -> Tensor:
    """Add uniform noise to training hidden states, bounded by `noise` times each state's RMS.

    The noise keeps heads from memorizing a small cache. EAGLE (arXiv 2401.15077) adds U(-0.1, 0.1)
    to every entry; here the bound is relative, because the scale of hidden states differs between
    targets. If `noise` is 0, the states are returned unchanged.

    Args:
        states_ND: The states of one worker.
        noise: The bound, as a factor of the root mean square of a state's entries.
        seed: The seed of the noise.
        first: The index of the first of these states in the batch over all workers.
        total: The number of states in that batch; by default these states alone.
    """
    if not noise:
        return states_ND
    number = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
    generator = torch.Generator(states_ND.device).manual_seed(int(number))
    num_rows, size = states_ND.shape
    drawn_ND = torch.rand(total or num_rows, size, generator=generator, device=states_ND.device)
    rms_N1 = states_ND.detach().float().square().mean(1, keepdim=True).sqrt()
    added_ND = 2 * noise * rms_N1 * (drawn_ND[first : first + num_rows] - 0.5)
    return states_ND + added_ND.to(states_ND.dtype)


def add_noise_to_rows(
    rows: Rows, noise: float, seed: tuple[int, ...], first: int, hidden_size: int
) -> Rows:
    """Add noise to the states of whole rows, to each layer's state alone; see `add_noise`.

    Each row has its own seed, so its noise does not depend on the number of workers.

    Args:
        rows: The rows of one worker.
        noise, seed: As in `add_noise`.
        first: The index of the first of these rows in the batch over all workers.
        hidden_size: The size of one layer's state.
    """
    if not noise:
        return rows
    sizes = rows.start_S.unique_consecutive(return_counts=True)[1].tolist()
    noised = [rows.states_SX[:0]]
    for number, states_TX in enumerate(rows.states_SX.split(sizes), start=first):
        states_ND = states_TX.reshape(-1, hidden_size)
        noised.append(add_noise(states_ND, noise, (*seed, number)).view_as(states_TX))
    return rows._replace(states_SX=torch.cat(noised))
