"""Sizes of `benchmarks.gpu`: a Mistral-7B-shaped target, or a tiny one on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

MISTRAL_7B = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Size:
    """Sizes and device of the gpu benchmark."""

    device: torch.device
    shape: dict[str, int]
    num_rows: int = 320
    shard_rows: int = 64
    row_tokens: tuple[int, int] = (512, 2048)
    batch_tokens: int = 16_384  # of a features forward and of a training step: the defaults of both
    rounds: int = 3
    peak_size: int = 8192
    epochs: int = 2
    warm_steps: int = 6  # training steps before the timed ones
    tree_nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    num_prompts: int = 6
    prompt_tokens: int = 512
    new_tokens: int = 48
    vocabularies: tuple[int, ...] = (32_000, 128_256)
    batches: tuple[int, ...] = (4, 16)  # texts that are decoded at once
    batch_nodes: tuple[int, ...] = (16, 64)
    seconds: Mapping[str, float] = field(
        default_factory=lambda: {
            "features": 110,
            "decoding": 130,
            "batches": 36,
            "training": 90,
            "heads": 110,
        }
    )


FULL = Size(torch.device("cuda"), MISTRAL_7B)
TINY = Size(
    torch.device("cpu"),
    MISTRAL_7B
    | {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 32,
    }
    | {"num_attention_heads": 2, "num_key_value_heads": 1},
    num_rows=24,
    shard_rows=8,
    row_tokens=(16, 96),
    batch_tokens=256,
    rounds=1,
    peak_size=64,
    epochs=1,
    warm_steps=1,
    tree_nodes=(2, 6),
    num_prompts=2,
    prompt_tokens=12,
    new_tokens=8,
    vocabularies=(256, 300),
    batches=(2,),
    batch_nodes=(2,),
)
