"""Medusa-2: heads and backbone learn together, and the backbone is held to what it was (paper 2.2.2, 2.3.2).

The loss is L_backbone + lambda_0(t) · sum over heads of 0.8^(k+1) CE_k. L_backbone is KL(original ‖ tuned) over every
position whose next token the target wrote, or that token's cross entropy; each sum is divided by its own count over all
workers and accumulated sequences, so that neither how a step is cut up nor how many share it changes the curve. The
adapter and the heads are fp32; with bf16, products are. Dropout is drawn anew from (seed, step, sequence): a run that
was interrupted continues at the very next step and, on a CPU, ends with the same weights, bit for bit.

Letters: B sequences, T tokens, N learned positions, D hidden size, V vocabulary, K heads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.artifacts.trained_heads import load_heads, read_summary, write_heads
from pipeline.errors import DataError
from pipeline.training.adapted import Backbone, write_adapter
from pipeline.training.backbone_losses import summed_kl, summed_next_token_loss
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.drift import evaluate_tuned
from pipeline.training.evaluate import SPLIT
from pipeline.training.medusa1 import initial_heads
from pipeline.training.metrics import MetricsLog
from pipeline.training.optimizers import make_optimizer, set_lr
from pipeline.training.schedules import cosine_with_warmup, heads_weight
from pipeline.training.state import Course, Progress, require_finite, resume, save, trained
from pipeline.training.task import TrainSpec, choose_device, memory_errors, product_dtype
from pipeline.training.texts import Text, TextBatch, TextPlan, assemble_texts, count_labels, read_texts
from pipeline.training.world import World

Numbered = tuple[int, TextBatch]  # a batch, and the number of its first sequence within the step


def train_medusa2(
    spec: TrainSpec, world: World | None = None, on_progress: Progress | None = None, heads_from: Path | None = None
) -> dict[str, Any]:
    """Train heads and adapter; returns {steps, tokens, seconds, tokens_per_second, final_loss, held_out, drift}.

    Leaves `adapter/` as peft reads it and what `train_medusa1` leaves. A run that is finished already only returns its
    summary. The heads start as the target's own prediction, or as those in the file `heads_from`.

    Raises:
        CheckFailed: The loss or its gradient is no longer finite.
        ConfigError: The target cannot be tuned; see `Backbone`.
        DataError: A shard is damaged or of another run or target, there is nothing to learn, or heads of another shape
            lie where these are to be.
        EnvironmentFault: The GPU or bitsandbytes is missing, memory is too small, or the disk is full.
    """
    if summary := read_summary(spec.heads_path, spec.heads_shape):
        return summary
    world, device = world or World(), choose_device(spec)
    with ExitStack() as stack:
        stack.enter_context(memory_errors(spec))
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        trainer = Trainer(spec, world, device, heads_from)
        require_held_out(trainer.texts)
        checkpoints = stack.enter_context(Checkpoints(spec.path / "checkpoints", spec.settings.keep_checkpoints))
        course = resume(checkpoints, trainer.modules, trainer.optimizer, world)
        log = stack.enter_context(MetricsLog(spec.path, course.step)) if world.is_first else None
        if course.step == 0:
            course.held_out, course.drift = trainer.evaluate()
            if log:
                log.write(0, {"held_out": course.held_out, "drift": course.drift})
        while course.step < trainer.total_steps:
            started = time.monotonic()
            figures = trainer.step(course.step)
            course.advance(figures["loss"], figures.pop("positions"), time.monotonic() - started)
            figures |= {"tokens": course.tokens, "tokens_per_second": course.tokens_per_second}
            if course.step % trainer.plan.steps_per_epoch == 0:
                course.held_out, course.drift = trainer.evaluate()
                figures |= {"held_out": course.held_out, "drift": course.drift}
            if log:
                log.write(course.step, {"epoch": course.step / trainer.plan.steps_per_epoch, **figures})
            if world.is_first and course.step % spec.settings.checkpoint_every == 0:
                save(checkpoints, trainer.modules, trainer.optimizer, course)
            if on_progress:
                on_progress(course.step, trainer.total_steps, figures["loss"], course.tokens_per_second)
    return trainer.finish(course)


class Trainer:
    """The model, its optimizer and its data, and one step of them."""

    def __init__(self, spec: TrainSpec, world: World, device: torch.device, heads_from: Path | None = None):
        self.spec, self.world, self.device = spec, world, device
        self.settings, self.dtype = spec.settings, product_dtype(spec, device)
        self.texts = open_texts(spec)
        self.plan = text_plan(spec, self.texts["train"])
        self.total_steps = self.plan.steps_per_epoch * spec.settings.epochs
        torch.manual_seed(spec.seed)  # every worker draws the same adapter
        self.backbone = Backbone(spec.trained_target, spec.settings.backbone, device, self.dtype, world)
        self.heads = (load_heads(heads_from) if heads_from else initial_heads(spec)).to(device)
        self.modules = {"heads": self.heads, "backbone": self.backbone}
        self.optimizer = make_optimizer(self.heads, spec.settings, self.backbone)
        self.parameters = [parameter for module in self.modules.values() for parameter in trained(module).values()]

    def step(self, step: int) -> dict[str, Any]:
        """One optimizer step, of which this worker computes a share; returns the figures of the whole."""
        settings = self.settings
        share = cosine_with_warmup(step, self.total_steps, min(settings.warmup_steps, self.total_steps // 2))
        weight = heads_weight(step, self.total_steps, settings.backbone.lambda_0, settings.backbone.schedule)
        batches = list(self.batches(step))
        counts = count_labels([batch for _, batch in batches], settings.num_heads).to(self.device)
        counts = self.world.sum(counts).clamp(min=1)  # every worker divides by the labels of the whole step
        decays_K = settings.decay ** torch.arange(1, settings.num_heads + 1, device=self.device)
        weights = torch.cat([torch.ones(1, device=self.device), weight * decays_K])

        self.optimizer.zero_grad(set_to_none=True)
        self.backbone.train()
        sums = torch.zeros(1 + settings.num_heads, device=self.device)
        for number, batch in batches:
            torch.manual_seed(_seed_of(self.spec.seed, step, number))
            losses = self.losses(batch.to(self.device))
            (weights / counts * losses).sum().backward()
            sums += losses.detach()
        self.backbone.eval()

        for parameter in self.parameters:  # what no forward runs adds nothing to the sum
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self.world.sum_all([sums, *(parameter.grad for parameter in self.parameters if parameter.grad is not None)])
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, settings.max_grad_norm)
        means = sums / counts
        scalars = torch.stack([(weights * means).sum(), norm])
        loss, grad_norm, backbone_loss, *head_losses = torch.cat([scalars, means]).tolist()
        lr, backbone_lr = share * settings.lr, share * settings.peak_backbone_lr
        require_finite(loss, grad_norm, lr, self.spec)
        set_lr(self.optimizer, share)
        self.optimizer.step()
        figures = {"loss": loss, "backbone_loss": backbone_loss, "head_losses": head_losses, "heads_weight": weight}
        rates = {"grad_norm": grad_norm, "lr": lr, "backbone_lr": backbone_lr}
        return {**figures, **rates, "positions": int(counts[0])}

    def losses(self, batch: TextBatch) -> torch.Tensor:
        """The backbone's loss and each head's, summed over the batch: [1 + K]."""
        with self.autocast():
            # The original first, while no activations of the tuned model are held.
            original_ND = self.backbone.original_states(batch) if self.settings.backbone.loss == "kl" else None
            hidden_ND = self.backbone.states(batch)
            low_NR = self.backbone.low(hidden_ND)
            head_losses_K = self.heads.summed_losses(hidden_ND, batch.next_N, batch.labels_KN)
        hidden_ND, head = hidden_ND.to(self.dtype), self.backbone.head
        if original_ND is None:
            backbone_loss = summed_next_token_loss(hidden_ND, low_NR, head, batch.next_N)
        else:
            backbone_loss = summed_kl(hidden_ND, low_NR, head, original_ND)
        return torch.cat([backbone_loss[None], head_losses_K])

    def batches(self, step: int) -> Iterator[Numbered]:
        """This worker's part of a step: equally many batches as any other's, of which the last may hold nothing."""
        epoch, step = divmod(step, self.plan.steps_per_epoch)
        share = self.plan.sequences(epoch, step, self.world.rank, self.world.size)
        texts, size = self.texts["train"], self.settings.backbone.micro_batch
        for start in range(0, self.plan.largest_share(step, self.world.size), size):
            part = share[start : start + size]
            sequences = [[texts[index] for index in group] for _, group in part]
            yield part[0][0] if part else 0, assemble_texts(sequences, self.settings.num_heads)

    def evaluate(self) -> tuple[list[dict[str, float]], dict[str, Any]]:
        """The heads' figures and the backbone's drift, on held-out text."""
        return evaluate_tuned(self.backbone, self.heads, self.texts, self.spec, self.world, self.autocast)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def finish(self, course: Course) -> dict[str, Any]:
        """Write adapter and heads, the heads last: where they are, training is finished."""
        cut = sum(text.num_cut for text in self.texts["train"])
        summary = course.summary() | {"tokens_beyond_sequence": cut, "sequences": len(self.plan.groups)}
        if bits := self.spec.trained_target.quantization:
            summary |= {"quantization": bits}  # what the drift is measured in, and from
        if self.world.is_first:
            write_adapter(self.spec.adapter_path, self.backbone, self.spec.target)
            write_heads(self.spec.heads_path, self.heads, summary)
        return summary


def open_texts(spec: TrainSpec) -> dict[str, list[Text]]:
    """The generated conversations by split, checked against the run and the target; raises DataError."""
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
        raise DataError(what, "train.roles", "Generate more answers, learn from other roles or raise the length.")
    return texts


def require_held_out(texts: dict[str, list[Text]]) -> None:
    """Refuse to train where nobody could say how far the backbone has moved; raises DataError."""
    if not any(text.num_read for text in texts.get(SPLIT, ())):
        what = "No held-out row has target-written text within train.backbone.sequence_length to measure the drift on."
        raise DataError(what, "train.backbone.sequence_length", "Raise it, or hold out more rows (seeds.holdout).")


def text_plan(spec: TrainSpec, texts: Sequence[Text]) -> TextPlan:
    """The steps of every epoch."""
    settings = spec.settings.backbone
    sizes = {"sequence_length": settings.sequence_length, "batch_sequences": settings.batch_sequences}
    return TextPlan(texts, **sizes, seed=spec.seed)


def _seed_of(*numbers: int) -> int:
    """One seed from several numbers, none of which is like another's."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
