"""What a training step holds of a device's memory at its peak, by arithmetic, before anything is loaded.

The peak is either in the loss, when states, logits and the lm_heads' new gradients are held, or at the optimizer's
step, when every gradient is. Weights, gradients and moments are fp32 and do not depend on the batch; states do. A test
runs the same steps on tensors without storage and compares what they hold.

Letters as in the trainer: N positions of a micro-batch on one worker, K heads, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipeline.config import TrainConfig
from pipeline.config.training import Bits
from pipeline.execution.device_memory import Memory
from pipeline.heads.accuracy import RANKED_BYTES
from pipeline.heads.losses import SLICES, chunk_bytes_on
from pipeline.targets.sizes import TargetSizes
from pipeline.training.feature_batches import BATCHES_AHEAD
from pipeline.training.recipe import Recipe

if TYPE_CHECKING:
    from pipeline.heads.kind import Heads
    from pipeline.heads.shape import HeadsShape

FP32, INT64 = 4, 8
MOMENTS = {"adamw": 2 * FP32, "adamw-8bit": 2 * (1 + FP32 / 256)}  # bytes a parameter; a scale for each 256 of 8 bit


@dataclass(frozen=True)
class HeadsSizes:
    """A set of heads in numbers (not bytes)."""

    num_heads: int
    hidden_size: int
    vocab_size: int  # the rows of an lm_head
    num_lm_heads: int  # one of each head, or one that all share
    weights: int
    trained: int
    trained_lm_head: int  # of them
    kept_per_position: int  # see `Heads.kept_per_position`

    @classmethod
    def of(cls, kind: type[Heads], shape: HeadsShape) -> HeadsSizes:
        heads = kind(shape, device=torch.device("meta"))
        return cls(
            shape.num_heads,
            shape.hidden_size,
            heads.lm_head.shape[-2],
            len(heads.lm_head) if heads.lm_head.dim() == 3 else 1,
            sum(weight.numel() for weight in heads.parameters()),
            sum(weight.numel() for weight in heads.parameters() if weight.requires_grad),
            heads.lm_head.numel() if heads.lm_head.requires_grad else 0,
            kind.kept_per_position(shape),
        )


@dataclass(frozen=True)
class StepSizes:
    """What a worker's step is made of."""

    settings: TrainConfig
    heads: HeadsSizes
    target: TargetSizes
    recipe: Recipe
    workers: int
    on_gpu: bool
    quantization: Bits | None = None  # of the target
    split: bool = False  # whether each worker holds a part of the heads

    @property
    def parts(self) -> int:
        """In how many parts the heads are held."""
        return self.workers if self.split else 1

    @property
    def product_bytes(self) -> int:
        """Of a number in matrix products."""
        precision = self.settings.precision
        return 2 if precision == "bf16" or (precision == "auto" and self.on_gpu) else FP32

    @property
    def chunk_bytes(self) -> int:
        return chunk_bytes_on(torch.device("cuda" if self.on_gpu else "cpu"))


def rows_at_a_time(vocab_size: int, dtype: torch.dtype, held: int, num_rows: int, chunk_bytes: int) -> tuple[int, int]:
    """The rows of a chunk and of a slice in heads/losses.py, where each logit of a slice has `held` exact numbers."""
    exact_bytes = 8 if dtype == torch.float64 else 4
    chunk = chunk_bytes // (vocab_size * (dtype.itemsize + (held - 1) * exact_bytes))
    chunk = max(1, min(chunk, num_rows))
    return chunk, min(chunk, max(1, chunk_bytes // SLICES // (vocab_size * exact_bytes * held)))


def block_rows(hidden_size: int, dtype: torch.dtype, chunk_bytes: int) -> int:
    """How many rows of an lm_head's gradient are multiplied at a time in heads/losses.py."""
    return max(1, chunk_bytes // SLICES // (hidden_size * dtype.itemsize))


def cached_step(step: StepSizes) -> Memory:
    """A step of heads alone, which reads the cache: one micro-batch, the worker's share of `batch_tokens`."""
    heads, num_positions = step.heads, -(-step.recipe.batch_tokens // step.workers)
    teacher = step.settings.soft_labels > 0
    state_bytes = heads.hidden_size * step.target.itemsize * (2 if teacher else 1)
    label_bytes = INT64 * (1 + heads.num_heads * (2 if teacher else 1))
    batches = (BATCHES_AHEAD + 1) * num_positions * (state_bytes + label_bytes)
    matrix = step.target.vocab_size * heads.hidden_size * step.product_bytes if teacher else 0
    resident = Memory(
        heads=heads_bytes(step),
        optimizer=MOMENTS[step.settings.optimizer] * heads.trained / step.parts,
        activations=batches + matrix,
    )
    in_loss = resident.plus(
        gradients=lm_head_gradients(step, num_positions, teacher=teacher),
        activations=heads_states(step, num_positions) + heads_logits(step, num_positions, teacher=teacher),
    )
    at_the_end = resident.plus(gradients=FP32 * heads.trained / step.parts)
    return max(in_loss, at_the_end, key=lambda memory: memory.total)


def heads_bytes(step: StepSizes) -> float:
    """The heads' weights: all, or a worker's part, and whole meanwhile what the heads' states are made of."""
    heads, frozen = step.heads, step.heads.weights - step.heads.trained
    whole = heads.trained - heads.trained_lm_head if step.split else 0
    return FP32 * (frozen + heads.trained / step.parts + whole)


def lm_head_gradients(step: StepSizes, num_positions: int, *, teacher: bool) -> float:
    """What the loss holds of the lm_heads' gradients: all; or a worker's part of each, and one that is whole where its
    rows are more than a chunk."""
    heads, one = step.heads, step.heads.vocab_size * step.heads.hidden_size
    if not step.split or not heads.trained_lm_head:
        return FP32 * heads.trained_lm_head
    rows, of_one, _ = _chunk_sizes(step, num_positions, teacher=teacher)
    return FP32 * (heads.trained_lm_head / step.parts + (one if rows < of_one else 0))


def heads_states(step: StepSizes, num_positions: int) -> float:
    """What a loss of the heads keeps for backward: states, their gradients, the weights in the products' dtype."""
    heads, width = step.heads, step.product_bytes
    cast = heads.trained - heads.trained_lm_head if width < FP32 else 0
    gradient = heads.num_heads * heads.hidden_size * num_positions
    return width * (heads.kept_per_position * num_positions + gradient + cast)


def heads_logits(step: StepSizes, num_positions: int, *, teacher: bool) -> float:
    """A chunk's logits and states, the copy of an lm_head that products read and what they make (heads/losses.py)."""
    heads, width, held = step.heads, step.product_bytes, 2 if teacher else 1
    rows, of_one, slice_rows = _chunk_sizes(step, num_positions, teacher=teacher)
    logits = heads.vocab_size * (rows * (width + (held - 1) * FP32) + slice_rows * held * FP32)
    states = 2 * rows * heads.hidden_size * width
    trains, rounds = heads.trained_lm_head > 0, width < FP32
    matrix_rows = heads.vocab_size if rounds or (step.split and trains) else 0  # rounded, or whole of a part
    product_rows = 0
    if trains and rounds:
        product_rows = min(heads.vocab_size, block_rows(heads.hidden_size, torch.bfloat16, step.chunk_bytes))
    matrices = width * (matrix_rows + product_rows)
    if step.split and trains and rows == of_one:  # blocks of the gradient, when the lm_head is no longer needed
        blocks = product_rows * (2 * FP32 + width) if rounds else heads.vocab_size * FP32
        matrices = max(width * matrix_rows, blocks)
    return logits + states + matrices * heads.hidden_size


def _chunk_sizes(step: StepSizes, num_positions: int, *, teacher: bool) -> tuple[int, int, int]:
    """The rows of a chunk of the loss, those that one lm_head reads in all, and those of a slice."""
    heads, dtype = step.heads, torch.bfloat16 if step.product_bytes < FP32 else torch.float32
    of_one = heads.num_heads // heads.num_lm_heads * num_positions
    rows, slice_rows = rows_at_a_time(heads.vocab_size, dtype, 2 if teacher else 1, of_one, step.chunk_bytes)
    return rows, of_one, slice_rows


def held_out_rows(heads: HeadsSizes, depth: int, num_positions: int) -> Memory:
    """Calibration on a held-out conversation: the heads in fp32, their states, a chunk of logits and the next one.

    `depth` is how many tokens they propose.
    """
    states = num_positions * heads.hidden_size * (1 + depth)
    logits = min(RANKED_BYTES, FP32 * heads.vocab_size * num_positions)
    return Memory(heads=FP32 * heads.weights, activations=FP32 * states + 2 * logits)


def tuned_step(step: StepSizes) -> Memory:
    """A step of heads and backbone: micro-batches of packed sequences, which accumulate."""
    settings, heads, target, width = step.settings.backbone, step.heads, step.target, step.product_bytes
    num_positions = settings.micro_batch * settings.sequence_length  # all of them learned, at most
    lora = settings.lora_rank * target.adapted
    weights, trained = target.weight_bytes(settings.quantization_beside(step.quantization)), heads.trained + lora
    if settings.shard and step.workers > 1:  # each holds its part, and two layers whole
        in_layers = target.in_layers * target.itemsize
        weights += in_layers / step.workers - in_layers + 2 * in_layers / target.num_hidden_layers
    resident = Memory(
        weights=weights,
        heads=heads_bytes(step) + FP32 * lora,
        optimizer=MOMENTS[step.settings.optimizer] * (heads.trained / step.parts + lora),
    )
    sequences = step.recipe.batch_sequences or 1
    accumulated = FP32 * trained if -(-sequences // step.workers) > settings.micro_batch else 0
    kept, one_layer = _backbone_states(step, num_positions, lora)
    teacher = step.settings.soft_labels > 0
    logits = heads_logits(step, num_positions, teacher=teacher)
    of_lm_heads = lm_head_gradients(step, num_positions, teacher=teacher)
    divergence = step.chunk_bytes + width * num_positions * heads.hidden_size
    in_loss = resident.plus(
        gradients=of_lm_heads + FP32 * settings.lora_rank * target.vocab_size + accumulated,
        activations=kept + heads_states(step, num_positions) + max(logits, divergence),
    )
    of_heads = FP32 * heads.trained if accumulated else FP32 * heads.trained / step.parts
    in_backward = resident.plus(gradients=of_heads + FP32 * lora, activations=kept + one_layer)
    return max(in_loss, in_backward, key=lambda memory: memory.total)


def _backbone_states(step: StepSizes, num_positions: int, lora: int) -> tuple[float, float]:
    """What the backbone keeps for backward, with its last states, tuned and original; and what one layer adds to it.

    With checkpointing that is the layer which is computed again.
    """
    settings, target, width = step.settings.backbone, step.target, step.product_bytes
    dropped = width + 1 if settings.lora_dropout else width  # each linear layer's own input after dropout, and a mask
    low = width * settings.lora_rank * target.adapted_in_layer
    norms = 2 * target.hidden_size * (FP32 + 2 * width)
    outputs = width * (target.linear_outputs + target.width)
    one_layer = num_positions * (dropped * target.linear_inputs + outputs + norms + low)
    last = num_positions * target.hidden_size * (3 * width + 2 * FP32) + (width * lora if width < FP32 else 0)
    if settings.gradient_checkpointing:
        return last + num_positions * target.num_hidden_layers * width * target.hidden_size, one_layer
    return last + target.num_hidden_layers * one_layer, 0
