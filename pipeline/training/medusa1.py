"""Medusa-1: the heads learn from cached hidden states, the backbone is never run (paper 2.2.1).

The loss is the sum over heads of 0.8^(k+1) CE_k, each CE over the labels of the whole batch, whichever worker holds
them: one worker and many follow the same curve within the noise of a sum. Weights are fp32; with bf16, products are.
A run that was interrupted continues from its newest whole checkpoint at the very next batch; on a CPU it ends with
the same weights, bit for bit.

Letters: N positions, D hidden size, V vocabulary, K heads.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from pipeline.artifacts.feature_rows import FeatureRows
from pipeline.artifacts.trained_heads import read_summary, write_heads
from pipeline.conversations.spans import IGNORED
from pipeline.errors import ConfigError, DataError
from pipeline.heads.kind import Heads, TargetWeights, head_kind
from pipeline.targets.lm_head import read_embedding, read_lm_head
from pipeline.training.batches import Batch, load_batches
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.epochs import EpochPlan
from pipeline.training.evaluate import evaluate
from pipeline.training.metrics import MetricsLog
from pipeline.training.optimizers import make_optimizer
from pipeline.training.schedules import cosine_with_warmup
from pipeline.training.state import Progress, require_finite, resume, save
from pipeline.training.task import TrainSpec, choose_device, memory_errors, product_dtype
from pipeline.training.world import World


def train_medusa1(spec: TrainSpec, world: World | None = None, on_progress: Progress | None = None) -> dict[str, Any]:
    """Train the heads; returns {steps, tokens, seconds, tokens_per_second, final_loss, held_out}.

    Leaves `heads.safetensors`, `summary.jsonl`, `metrics.jsonl`, `tensorboard/` and `checkpoints/` in the directory. A
    run that is finished already only returns its summary.

    Raises:
        CheckFailed: The loss or its gradient is no longer finite.
        ConfigError: The target's lm_head has another size than its configuration says.
        DataError: A shard is damaged or of another run or target, there is nothing to learn, or heads of another shape
            lie where these are to be.
        EnvironmentFault: The GPU or bitsandbytes is missing, or the disk is full.
    """
    if summary := read_summary(spec.heads_path, spec.heads_shape):
        return summary
    world = world or World()
    settings, device = spec.settings, choose_device(spec)
    dtype = product_dtype(spec, device)
    rows = open_features(spec)
    lengths = rows.lengths("train")
    total_steps = count_steps(spec, rows)
    steps_per_epoch = total_steps // settings.epochs
    warmup_steps = min(settings.warmup_steps, total_steps // 2)  # however few steps there are, lr is reached

    with ExitStack() as stack:
        stack.enter_context(memory_errors(spec))
        heads = initial_heads(spec).to(device)
        optimizer = make_optimizer(heads, settings)
        checkpoints = stack.enter_context(Checkpoints(spec.path / "checkpoints", settings.keep_checkpoints))
        course = resume(checkpoints, {"heads": heads}, optimizer, world)
        log = stack.enter_context(MetricsLog(spec.path, course.step)) if world.is_first else None

        def held_out() -> list[dict[str, float]]:
            return evaluate(heads, rows, world, batch_tokens=settings.batch_tokens, dtype=dtype)

        if course.step == 0:
            course.held_out = held_out()
            if log:
                log.write(0, {"held_out": course.held_out})
        while course.step < total_steps:
            epoch, first = divmod(course.step, steps_per_epoch)
            plan = EpochPlan(lengths, batch_tokens=settings.batch_tokens, seed=spec.seed, epoch=epoch)
            steps = range(first, steps_per_epoch)
            started = time.monotonic()
            for batch in load_batches(rows, plan, steps, rank=world.rank, world_size=world.size, device=device):
                lr = settings.lr * cosine_with_warmup(course.step, total_steps, warmup_steps)
                figures = learn(heads, optimizer, batch, lr, spec, world)
                course.advance(figures["loss"], figures.pop("positions"), time.monotonic() - started)
                figures |= {"tokens": course.tokens, "tokens_per_second": course.tokens_per_second}
                if course.step % steps_per_epoch == 0:
                    figures["held_out"] = course.held_out = held_out()
                if log:
                    log.write(course.step, {"epoch": course.step / steps_per_epoch, **figures})
                if world.is_first and course.step % settings.checkpoint_every == 0:
                    save(checkpoints, {"heads": heads}, optimizer, course)
                if on_progress:
                    on_progress(course.step, total_steps, figures["loss"], course.tokens_per_second)
                started = time.monotonic()
    if world.is_first:
        write_heads(spec.heads_path, heads, course.summary())
    return course.summary()


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
    if not sum(int(lengths.sum()) for lengths in rows.lengths("train")):
        what = f"No train row has target-written text of two tokens or more in the roles {spec.settings.roles}."
        raise DataError(what, "train.roles", "Generate more or longer answers, or learn from other roles.")
    return rows


def count_steps(spec: TrainSpec, rows: FeatureRows) -> int:
    """Optimizer steps of the whole training."""
    plan = EpochPlan(rows.lengths("train"), batch_tokens=spec.settings.batch_tokens, seed=spec.seed)
    return plan.num_steps * spec.settings.epochs


def initial_heads(spec: TrainSpec) -> Heads:
    """Untrained heads of the kind that is asked for, in fp32 on the CPU."""

    def of_the_right_size(name: str, matrix_VD: Tensor) -> Tensor:
        if matrix_VD.shape != (spec.vocab_size, spec.hidden_size):
            found, said = " x ".join(map(str, matrix_VD.shape)), f"{spec.vocab_size} x {spec.hidden_size}"
            what = f"The target's {name} is {found}, its configuration says {said}."
            raise ConfigError(what, spec.target.model, "Check the target's config.json against its weights.")
        return matrix_VD.float()

    target = TargetWeights(
        lambda: of_the_right_size("lm_head", read_lm_head(spec.target)),
        lambda: of_the_right_size("embedding", read_embedding(spec.target)),
    )
    return head_kind(spec.settings.heads).initial(spec.heads_shape, target)


def learn(
    heads: Heads, optimizer: torch.optim.Optimizer, batch: Batch, lr: float, spec: TrainSpec, world: World
) -> dict[str, Any]:
    """One optimizer step on one batch, of which this worker holds a share; returns the figures of the whole batch."""
    settings, device = spec.settings, heads.device
    dtype = product_dtype(spec, device)
    counts_K = world.sum((batch.labels_KN != IGNORED).sum(1))  # head 0 has a label at every position
    decays_K = settings.decay ** torch.arange(1, settings.num_heads + 1, device=device)
    weights_K = decays_K / counts_K.clamp(min=1)  # every worker divides by the whole batch's labels

    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        sums_K = heads.summed_losses(batch.hidden_ND, batch.next_N, batch.labels_KN)
    (weights_K * sums_K).sum().backward()

    parameters = [parameter for parameter in heads.parameters() if parameter.requires_grad]
    sums_K = sums_K.detach()
    world.sum_all([sums_K, *(parameter.grad for parameter in parameters if parameter.grad is not None)])
    norm = torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
    scalars = torch.stack([(weights_K * sums_K).sum(), norm, counts_K[0]])
    loss, grad_norm, positions, *head_losses = torch.cat([scalars, sums_K / counts_K.clamp(min=1)]).tolist()
    require_finite(loss, grad_norm, lr, spec)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return {"loss": loss, "head_losses": head_losses, "grad_norm": grad_norm, "lr": lr, "positions": int(positions)}
