"""Claims for a GPU: features at 70 % of its peak, training at 55 %, neither limited by files, a
tree costs 15 %.

    python -m benchmarks.gpu           # one GPU; 10 minutes. No Ray, no vLLM, nothing downloaded
    python -m benchmarks.gpu --tiny    # a smoke test on a CPU; figures are meaningless and not kept

A target of Mistral-7B's shape with random bf16 weights, made on the card. Measured, in turns with
the peak (products of large random matrices, in the same dtype): the features stage's whole worker;
`train` from the shards that it wrote; and writing and reading those shards alone. Native decoding,
plain and with trees of several sizes, of one text and of several at once. Then a step of every kind
of head with vocabularies of 32,000 and 128,256 tokens, its memory and a checkpoint. Each part has
its share of the time, and what it does not reach is said as not measured.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel

from benchmarks import rows
from benchmarks.claims import Result
from benchmarks.deadline import deadlines
from pipeline.targets.loading import lm_head_weight
from pipeline.targets.spec import TargetSpec

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
    """How much is measured, and where."""

    device: torch.device
    shape: dict[str, int]
    num_rows: int = 320
    row_tokens: tuple[int, int] = (512, 2048)
    batch_tokens: int = 16_384  # of a features forward and of a training step: the defaults of both
    rounds: int = 3
    peak_size: int = 8192
    epochs: int = 2
    warm_steps: int = 6  # of a training, before its clock counts
    tree_nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    num_prompts: int = 6
    prompt_tokens: int = 512
    new_tokens: int = 48
    vocabularies: tuple[int, ...] = (32_000, 128_256)
    batches: tuple[int, ...] = (4, 16)  # texts that are decoded at once
    batch_nodes: tuple[int, ...] = (16, 64)
    seconds: Mapping[str, float] = field(
        default_factory=lambda: {
            "features": 140,
            "decoding": 150,
            "batches": 40,
            "training": 120,
            "heads": 140,
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


def measure(*, tiny: bool = False, clock: Callable[[], float] = perf_counter) -> Result:
    """Features, decoding, then training, for which the backbone is freed."""
    from benchmarks.gpu_batches import measure_batches
    from benchmarks.gpu_decoding import measure_decoding
    from benchmarks.gpu_features import measure_features
    from benchmarks.gpu_heads import measure_heads
    from benchmarks.gpu_training import measure_training

    size = TINY if tiny else FULL
    ends = deadlines(size.seconds, clock)
    made = rows.ragged_rows(size.num_rows, *size.row_tokens, size.shape["vocab_size"])
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        tasks = rows.features_tasks(directory, [made])
        model = random_mistral(size)
        target = lm_head_alone(model, directory / "target")
        parts = [measure_features(model, tasks, made, size, ends["features"])]
        parts.append(measure_decoding(model, size, ends["decoding"]))
        parts.append(measure_batches(model, size, ends["batches"]))
        del model
        parts.append(measure_training(target, tasks, made, directory, size, ends["training"]))
        parts.append(measure_heads(tasks, directory, size, ends["heads"]))
    facts = {name: part.facts for name, part in zip(ends, parts, strict=True)}
    missing = [what for part in parts for what in part.not_measured]
    return Result([claim for part in parts for claim in part.claims], facts, missing)


def random_mistral(size: Size) -> PreTrainedModel:
    """The target, frozen, its random weights drawn on the device itself."""
    torch.manual_seed(0)
    config = MistralConfig(**size.shape, sliding_window=None, tie_word_embeddings=False)
    with size.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def lm_head_alone(model: PreTrainedModel, directory: Path) -> TargetSpec:
    """A target's directory with its configuration and lm_head, which is what training reads."""
    model.config.save_pretrained(directory)
    save_file(
        {"lm_head.weight": lm_head_weight(model).cpu()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    return TargetSpec(str(directory), dtype="bfloat16")


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["gpu", *sys.argv[1:]]))
