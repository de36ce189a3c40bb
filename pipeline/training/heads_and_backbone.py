"""Heads and backbone together: the backbone learns along and is held to what it was (Medusa-2,
paper 2.2.2, 2.3.2).

The loss is L_backbone + lambda_0(t) · sum over heads of 0.8^(k+1) CE_k. L_backbone is KL(original ‖
tuned) over every position whose next token the target wrote, or that token's cross entropy. The
heads' soft labels (`train.soft_labels`) are the original's predictions. The adapter and the heads
are fp32. Dropout and noise are drawn anew from (seed, step, sequence).

Letters: N learned positions, C components of the loss (the backbone's, then the heads'), K heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.config import TrainConfig
from pipeline.errors import DataError
from pipeline.heads.losses import TargetHead, Teacher
from pipeline.training.adapted_backbone import Backbone, write_adapter
from pipeline.training.backbone_losses import summed_divergence
from pipeline.training.evaluation import MAX_POSITIONS, SPLIT, evaluate_tuned
from pipeline.training.heads_only import head_weights, initial_heads
from pipeline.training.input_noise import noisy
from pipeline.training.learner import Learner
from pipeline.training.optimizers import heads_weight
from pipeline.training.recipe import Recipe, backbone_recipe
from pipeline.training.task import TrainSpec, Workers, product_dtype
from pipeline.training.text_batches import (
    Text,
    TextBatch,
    TextPlan,
    assemble_texts,
    pack,
    read_texts,
)


class MicroBatch(NamedTuple):
    """The sequences of one forward, and the seed of its dropout and noise."""

    texts: TextBatch
    seed: int


class BackboneLearner(Learner):
    """Heads and an adapter on the backbone, from the generated conversations.

    Raises:
        ConfigError: The target cannot be tuned; see `Backbone`.
        DataError: A shard is damaged or of another run or target, there is nothing to learn, or no
            held-out text to measure on how far the backbone moves.
    """

    tunes_backbone = True
    saves_memory = (
        "train.backbone.quantization: 4bit",
        "train.backbone.shard: true with several placement.train.workers",
    )

    def __init__(
        self,
        spec: TrainSpec,
        workers: Workers,
        device: torch.device,
        heads_from: Path | None = None,
    ):
        super().__init__(spec, workers, device, heads_from)
        self.settings, self.dtype = spec.settings.backbone, product_dtype(spec, device)
        self.texts = open_texts(spec)
        self.recipe, self.plan = (
            recipe_of(spec, self.texts["train"]),
            text_plan(spec, self.texts["train"]),
        )
        held_out = num_positions(self.texts.get(SPLIT, ()))
        self.held_out_share = min(held_out, MAX_POSITIONS) / num_positions(self.texts["train"])
        self.backbone = Backbone(spec.trained_target, self.settings, device, self.dtype, workers)
        self.heads = initial_heads(spec, heads_from).to(device)
        self.modules = {"heads": self.heads, "backbone": self.backbone}
        self.peak_lrs = {"heads": self.recipe.lr, "backbone": self.settings.peak_lr(self.recipe.lr)}

    @classmethod
    def recipe_of(cls, spec: TrainSpec) -> Recipe:
        return recipe_of(spec, open_texts(spec)["train"])

    @classmethod
    def expected_recipe(
        cls, settings: TrainConfig, positions: int, hidden_size: int, lr_scale: float
    ) -> Recipe:
        """As if sequences held nothing but what the target writes: in truth there are some more
        steps.
        """
        sequences = -(-positions // settings.backbone.sequence_length)
        return backbone_recipe(settings, sequences, positions, hidden_size, lr_scale)

    def steps(self, first: int) -> Iterator[Sequence[MicroBatch]]:
        for step in range(first, self.total_steps):
            yield list(self.batches(step))

    def batches(self, step: int) -> Iterator[MicroBatch]:
        """This worker's part of a step: equally many batches as any other's, of which the last may
        hold nothing.
        """
        epoch, of_epoch = divmod(step, self.steps_per_epoch)
        share = self.plan.sequences(epoch, of_epoch, self.workers.rank, self.workers.world_size)
        texts, size = self.texts["train"], self.settings.micro_batch
        for start in range(0, self.plan.largest_share(of_epoch, self.workers.world_size), size):
            part = share[start : start + size]
            sequences = [[texts[index] for index in group] for _, group in part]
            number = part[0][0] if part else 0  # of the first sequence within the step
            seed = np.random.SeedSequence((self.spec.seed, step, number)).generate_state(
                1, np.uint64
            )[0]
            yield MicroBatch(assemble_texts(sequences, self.spec.settings.num_heads), int(seed))

    def label_counts(self, batches: Sequence[MicroBatch]) -> Tensor:
        labels_KN = torch.cat([batch.texts.labels_KN for batch in batches], 1).to(self.device)
        next_tokens = torch.tensor([labels_KN.shape[1]], device=self.device)
        return torch.cat([next_tokens, self.heads.vocabulary.num_learned(labels_KN)])

    def loss_weights(self, step: int) -> Tensor:
        weights_K = self._heads_weight(step) * head_weights(self.spec, self.device)
        return torch.cat([torch.ones(1, device=self.device), weights_K])

    def summed_losses(self, batch: MicroBatch, weights_C: Tensor) -> Tensor:
        torch.manual_seed(batch.seed)
        texts, share, teacher = batch.texts.to(self.device), self.spec.settings.soft_labels, None
        with self.autocast():
            # The original first, while no activations of the tuned model are held.
            if share or self.settings.loss == "kl":
                original_ND = self.backbone.original_states(texts)
            if share:
                own = self.backbone.head
                teacher = Teacher(
                    TargetHead(own.weight_VD, own.bias_V), original_ND, texts.teacher_KN, share
                )
            truth = original_ND if self.settings.loss == "kl" else texts.next_N
            hidden_ND = self.backbone.states(texts)
            low_NR = self.backbone.low(hidden_ND)
            read_ND = noisy(hidden_ND, self.spec.settings.noise, (batch.seed,))
            head_losses_K = self.heads.summed_losses(
                read_ND, texts.next_N, texts.labels_KN, teacher, weights_C[1:]
            )
        backbone_loss = summed_divergence(
            hidden_ND.to(self.dtype), low_NR, self.backbone.head, truth
        )
        return torch.cat([backbone_loss[None], head_losses_K])

    def figures(self, step: int, means: list[float]) -> dict[str, Any]:
        losses = {
            "backbone_loss": means[0],
            "head_losses": means[1:],
            "heads_weight": self._heads_weight(step),
        }
        return losses | {"backbone_lr": self.lr_share(step) * self.peak_lrs["backbone"]}

    def evaluate(self) -> dict[str, Any]:
        """The heads' figures, and the drift: how far the backbone has moved; DataError without
        held-out text.
        """
        texts = self.texts.get(SPLIT, ())
        if not any(text.num_read for text in texts):
            where = "train.backbone.sequence_length"
            what = (
                f"No held-out row has target-written text within {where} to measure the drift on."
            )
            raise DataError(what, where, "Raise it, or hold out more rows (seeds.holdout).")
        figures, drift = evaluate_tuned(
            self.backbone, self.heads, texts, self.spec, self.workers, self.autocast
        )
        return figures | {"drift": drift}

    def facts(self) -> dict[str, Any]:
        cut = sum(text.num_cut for text in self.texts["train"])
        found = {"tokens_beyond_sequence": cut, "sequences": len(self.plan.groups)}
        bits = self.spec.trained_target.quantization  # what the drift is measured in, and from
        return found | ({"quantization": bits} if bits else {})

    def write(self) -> None:
        """The adapter, as peft reads it. Heads that borrow the target's matrices get the tuned
        ones, as engines do.
        """
        write_adapter(self.spec.adapter_path, self.backbone, self.spec.target)
        with torch.no_grad():
            self.heads.take_from(self.backbone.matrices().drafting(self.heads.vocabulary.token_map))

    def _heads_weight(self, step: int) -> float:
        return heads_weight(step, self.total_steps, self.settings.lambda_0, self.settings.schedule)


def open_texts(spec: TrainSpec) -> dict[str, list[Text]]:
    """The generated conversations by split, checked against the run and the target; raises
    DataError.
    """
    texts = read_texts(
        spec.texts,
        fingerprint=spec.texts_fingerprint,
        vocab_size=spec.vocab_size,
        roles=spec.settings.roles,
        sequence_length=spec.settings.backbone.sequence_length,
    )
    if not any(text.num_read for text in texts.get("train", ())):
        within = f"in the roles {spec.settings.roles} within train.backbone.sequence_length"
        what = f"No train row has target-written text {within}."
        raise DataError(
            what,
            "train.roles",
            "Generate more answers, learn from other roles or raise the length.",
        )
    return texts


def recipe_of(spec: TrainSpec, texts: Sequence[Text]) -> Recipe:
    sequences = len(pack([text.num_read for text in texts], spec.settings.backbone.sequence_length))
    return backbone_recipe(
        spec.settings, sequences, num_positions(texts), spec.hidden_size, spec.kind.lr_scale
    )


def num_positions(texts: Sequence[Text]) -> int:
    """Target-written tokens that are learned."""
    return sum(text.num_learned for text in texts)


def text_plan(spec: TrainSpec, texts: Sequence[Text]) -> TextPlan:
    """The steps of every epoch."""
    batch = recipe_of(spec, texts).batch_sequences
    assert batch is not None
    length = spec.settings.backbone.sequence_length
    return TextPlan(texts, sequence_length=length, batch_sequences=batch, seed=spec.seed)
