"""What heads hold of memory while they train, and whether several workers split them (`train.shard_heads`)."""

from __future__ import annotations

from pipeline.config import TrainConfig

FP32 = 4  # bytes
MOMENTS = {"adamw": 2 * FP32, "adamw-8bit": 2}  # bytes of a parameter's two moments
MOST = 0.8  # of a GPU's memory for what does not depend on the batch; the rest is for states and logits


def optimizer_bytes(train: TrainConfig, num_trained: float) -> float:
    """The optimizer's moments."""
    return MOMENTS[train.optimizer] * num_trained


def splits_heads(train: TrainConfig, num_workers: int, num_trained: int, gpu_bytes: float | None) -> bool:
    """Whether each worker keeps a part of the heads; `auto` splits those that a GPU does not hold whole.

    Args:
        num_trained: The heads' trained parameters.
        gpu_bytes: Memory of each worker's GPU that the backbone leaves; None without a GPU, or where it is not known.
    """
    if num_workers == 1 or train.shard_heads is False:
        return False
    if train.shard_heads is True:
        return True
    if gpu_bytes is None:
        return False
    weights_and_gradients = 2 * FP32 * num_trained
    return weights_and_gradients + optimizer_bytes(train, num_trained) > MOST * gpu_bytes
