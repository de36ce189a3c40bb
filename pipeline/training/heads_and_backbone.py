"""Medusa-2: train heads and backbone jointly with self-distillation (paper 2.2.2, 2.3.2).

The backbone's loss is L_backbone + lambda_0(t) · L_heads, with L_heads = sum over heads of
decay^(k+1) CE_k (`train.decay`, 0.8 in the paper). L_backbone is the mean of KL(original ‖ tuned)
over the positions whose next token the target wrote, or of the cross entropy of that token. The
heads' loss is L_heads itself. With the paper's factor lambda_0(t) their gradient would be too small
to be clipped, which recurrent heads need. The heads' soft labels (`train.soft_labels`) are the
original model's predictions. The adapter and the heads are fp32. Dropout and noise depend only on
(seed, step, first sequence of the micro-batch).

Letters: N learned positions, C components of the loss (the backbone's, then the heads'), K heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import DataError
from pipeline.heads.accuracy import Score, score_guesses
from pipeline.heads.losses import Teacher
from pipeline.training.adapted_backbone import Backbone, write_adapter
from pipeline.training.backbone_losses import Drift, add_drift, summed_backbone_loss
from pipeline.training.feature_batches import split_range
from pipeline.training.heads_only import add_noise, head_weights, initial_heads
from pipeline.training.held_out_accuracy import (
    MAX_POSITIONS,
    SPLIT,
    TOP,
    Evaluation,
    sample_rows,
    summarize_scores,
)
from pipeline.training.optimizers import heads_weight
from pipeline.training.recipe import Recipe, packed_length
from pipeline.training.task import Learner, StepMetrics, TrainSpec, Workers
from pipeline.training.text_batches import (
    Text,
    TextBatch,
    TextPlan,
    assemble_texts,
    pack_texts,
    read_texts,
)


class MicroBatch(NamedTuple):
    """Packed training sequences of one forward pass, and the seed of its dropout and noise.

    `heads_weight` is lambda_0(t), the weight of the heads' losses for the backbone.
    """

    texts: TextBatch
    seed: int
    heads_weight: float


class BackboneLearner(Learner):
    """Learner of Medusa-2: heads and a LoRA adapter on the backbone, from generated conversations.

    Raises:
        ConfigError, EnvironmentFault: As `Backbone` does.
        DataError: As in `Learner`.
    """

    tunes_backbone = True
    saves_memory = (
        "train.backbone.quantization: 4bit",
        "train.backbone.shard: true with several placement.train.workers",
    )

    def __init__(self, spec: TrainSpec, workers: Workers, device: torch.device):
        super().__init__(spec, workers, device)
        self.settings = spec.settings.backbone
        texts = open_texts(spec)
        self.texts = texts["train"]
        self.held_out = texts.get(SPLIT, [])
        groups = pack_to_train(self.texts, spec)
        self.recipe = spec.recipe(num_positions(self.texts), len(groups))
        assert self.recipe.batch_sequences is not None
        self.plan = TextPlan(groups, self.recipe.batch_sequences, spec.seed)
        evaluated = min(num_positions(self.held_out), MAX_POSITIONS)
        self.held_out_share = evaluated / num_positions(self.texts)
        self.backbone = Backbone(spec.trained_target, self.settings, device, self.dtype, workers)
        self.heads = initial_heads(spec).to(device)
        self.modules = {"heads": self.heads, "backbone": self.backbone}
        self.peak_lrs = {"heads": self.recipe.lr, "backbone": self.settings.lr}

    @classmethod
    def recipe_of(cls, spec: TrainSpec) -> Recipe:
        """Pack the generated conversations and return the recipe of Medusa-2 training.

        Raises DataError as `open_texts` does.
        """
        texts = open_texts(spec)["train"]
        groups = pack_to_train(texts, spec)
        return spec.recipe(num_positions(texts), len(groups))

    def steps(self, first: int) -> Iterator[Sequence[MicroBatch]]:
        """Yield this worker's list of micro-batches for each training step from `first` on."""
        for step in range(first, self.recipe.total_steps):
            yield list(self.batches(step))

    def batches(self, step: int) -> Iterator[MicroBatch]:
        """Yield this worker's micro-batches of a training step.

        Every worker has the same number of micro-batches; the last one may have no labels.
        """
        epoch, of_epoch = divmod(step, self.recipe.steps_per_epoch)
        size = self.settings.micro_batch
        share = self.plan.sequences(epoch, of_epoch, self.workers)
        for start in range(0, self.plan.largest_share(of_epoch, self.workers.world_size), size):
            chosen = share[start : start + size]
            sequences = [[self.texts[index] for index in group] for _, group in chosen]
            number = chosen[0][0] if chosen else 0  # of the first sequence within the step
            seed = np.random.SeedSequence((self.spec.seed, step, number))
            texts = assemble_texts(sequences, self.spec.settings.num_heads)
            drawn = int(seed.generate_state(1, np.uint64)[0])
            yield MicroBatch(texts, drawn, self.heads_weight(step))

    def label_counts(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Count the next tokens and each head's labels in this worker's part of a step, [C].

        Next tokens are the labels of the backbone's loss.
        """
        labels_KN = torch.cat([batch.texts.labels_KN for batch in batches], 1).to(self.device)
        next_tokens = torch.tensor([labels_KN.shape[1]], device=self.device)
        return torch.cat([next_tokens, self.heads.vocabulary.num_learned(labels_KN)])

    def loss_weights(self, step: int) -> Tensor:
        """Return the weights of the backbone's loss, 1, and of the heads' losses, [C]."""
        weights_K = head_weights(self.spec, self.device)
        return torch.cat([torch.ones(1, device=self.device), weights_K])

    def heads_weight(self, step: int) -> float:
        """Return lambda_0(t), the weight of the heads' losses for the backbone in this step."""
        return heads_weight(
            step, self.recipe.total_steps, self.settings.lambda_0, self.settings.schedule
        )

    def loss(self, batch: MicroBatch, weights_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return the micro-batch's weighted loss, and the backbone's and each head's sum [C].

        Seeds torch's generators, from which dropout is drawn.
        """
        torch.manual_seed(batch.seed)
        texts = batch.texts.to(self.device)
        share = self.spec.settings.soft_labels
        learns_kl = self.settings.loss == "kl"
        head = self.backbone.head
        original_ND = None
        teacher = None
        with self.autocast():
            # The original first, while no activations of the tuned model are held.
            if share or learns_kl:
                original_ND = self.backbone.original_states(texts)
                if share:
                    teacher = Teacher(head, original_ND, texts.teacher_KN, share)
            hidden_ND = self.backbone.states(texts)
            low_NR = self.backbone.lora_inner(hidden_ND)
            # The same values, of which only this share of the gradient reaches the backbone.
            shared_ND = torch.lerp(hidden_ND.detach(), hidden_ND, batch.heads_weight)
            read_ND = add_noise(shared_ND, self.spec.settings.noise, (batch.seed,))
            heads_loss, sums_K = self.heads.weighted_loss(
                read_ND, texts.next_N, texts.labels_KN, teacher, weights_C[1:]
            )
        backbone_loss = summed_backbone_loss(
            hidden_ND.to(self.dtype),
            low_NR,
            self.backbone.lora_outer,
            head,
            texts.next_N,
            original_ND if learns_kl else None,
        )
        loss = weights_C[0] * backbone_loss + heads_loss
        return loss, torch.cat([backbone_loss.detach()[None], sums_K])

    def metrics(self, step: int, means: list[float]) -> StepMetrics:
        """Return a step's metrics: mean losses, the heads' weight, the backbone's learning rate."""
        return {
            "backbone_loss": means[0],
            "head_losses": means[1:],
            "heads_weight": self.heads_weight(step),
            "backbone_lr": self.lr_share(step) * self.peak_lrs["backbone"],
        }

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Evaluate the heads and the backbone's drift on about `MAX_POSITIONS` held-out positions.

        The positions are divided among the workers. Leaves the backbone in evaluation mode. Raises
        DataError if nothing is held out.
        """
        if not self.held_out:
            where = "train.backbone.sequence_length"
            raise DataError(
                f"No held-out row has target-written text within {where} to measure the drift on.",
                where,
                "Raise it, or hold out more rows (seeds.holdout).",
            )
        chosen = sample_rows([text.num_learned for text in self.held_out], MAX_POSITIONS)
        texts = [self.held_out[index] for index in chosen]
        groups = pack_texts(texts, self.settings.sequence_length)
        drift = Drift.zero(self.device)
        total = Score.zero(self.heads.shape, TOP, self.device)
        self.backbone.eval()
        world_size = self.workers.world_size
        first, last = split_range(0, len(groups), self.workers.rank, world_size)
        for place in range(-(-len(groups) // world_size)):
            # Every worker runs the layers equally often, because they may be sharded.
            sequences = []
            if first + place < last:
                sequences = [[texts[index] for index in groups[first + place]]]
            batch = assemble_texts(sequences, self.spec.settings.num_heads).to(self.device)
            with self.autocast():
                hidden_ND = self.backbone.states(batch)
                original_ND = self.backbone.original_states(batch)
                low_NR = self.backbone.lora_inner(hidden_ND)
                total.add(score_guesses(self.heads, hidden_ND, batch.next_N, batch.labels_KN, TOP))
            add_drift(
                drift,
                hidden_ND.to(self.dtype),
                low_NR,
                self.backbone.lora_outer,
                self.backbone.head,
                batch.next_N,
                original_ND,
            )
        for sums in (*drift, *total):
            self.workers.sum_in_place(sums)
        return summarize_scores(total, drift.figures())

    def write(self) -> None:
        """Write the LoRA adapter, and update the heads' matrices that are taken from the target.

        These get the values of the tuned backbone, see `Heads.take_from`.
        """
        write_adapter(self.spec.adapter_path, self.backbone, self.spec.target)
        with torch.no_grad():
            self.heads.take_from(
                self.backbone.tuned_matrices().drafting(self.heads.vocabulary.token_map)
            )


def open_texts(spec: TrainSpec) -> dict[str, list[Text]]:
    """Read the generated conversations that Medusa-2 trains on, by split.

    Raises DataError if a shard is damaged or belongs to another run, if a token is outside the
    vocabulary, or if no train row has text to learn from.
    """
    texts = read_texts(
        spec.texts,
        fingerprint=spec.texts_fingerprint,
        vocab_size=spec.vocab_size,
        roles=spec.settings.roles,
        sequence_length=spec.settings.backbone.sequence_length,
    )
    if "train" not in texts:
        raise DataError(
            f"No train row has target-written text in the roles {spec.settings.roles} within"
            " train.backbone.sequence_length.",
            "train.roles",
            "Generate more answers, learn from other roles or raise the length.",
        )
    return texts


def num_positions(texts: Sequence[Text]) -> int:
    """Count the positions in these conversations that Medusa-2 learns from."""
    return sum(text.num_learned for text in texts)


def pack_to_train(texts: Sequence[Text], spec: TrainSpec) -> list[list[int]]:
    """Pack the conversations that Medusa-2 learns from, as `pack_texts` does.

    Sequences have as many tokens as `packed_length` returns.
    """
    num_tokens = sum(text.num_read for text in texts)
    length = packed_length(spec.settings, num_positions(texts), num_tokens, spec.kind)
    return pack_texts(texts, length)
