"""Benchmark of features, decoding and training on a GPU: shares of the peak, overhead of a tree.

    python -m benchmarks.gpu           # one GPU; 8 minutes. No Ray, no vLLM, nothing downloaded
    python -m benchmarks.gpu --tiny    # a smoke test on a CPU; figures are meaningless and not kept

Claims: features reach 70 % of the peak, training 55 %, and files limit neither; a decoding step
with a tree of 64 nodes takes at most 15 % more time than a plain one. The target has Mistral-7B's
shape and random bfloat16 weights, made on the GPU. Measured in turns with the peak (products of
large random matrices in the same dtype): the features stage's worker, training from the worker's
shards, and writing and reading the shards alone. Then native decoding, plain and with trees of
several sizes, of one text and of several. Then a training step of every kind of head with
vocabularies of 32,000 and 128,256 tokens: speed, memory and checkpoint. Each part has a share of
the time; claims that it does not reach are reported as not measured.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel

from benchmarks import rows
from benchmarks.claims import Result
from benchmarks.deadline import deadlines
from benchmarks.gpu_batches import measure_batches
from benchmarks.gpu_decoding import measure_decoding
from benchmarks.gpu_features import measure_features
from benchmarks.gpu_heads import measure_heads
from benchmarks.gpu_size import FULL, TINY, Size
from benchmarks.gpu_training import measure_training
from pipeline.targets.loading import lm_head_weight
from pipeline.targets.spec import TargetSpec


def measure(*, tiny: bool = False, clock: Callable[[], float] = perf_counter) -> Result:
    """Measure features and decoding, then free the backbone and measure training."""
    size = TINY if tiny else FULL
    ends = deadlines(size.seconds, clock)
    made = rows.ragged_rows(size.num_rows, *size.row_tokens, size.shape["vocab_size"])
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        shards = [
            made[first : first + size.shard_rows] for first in range(0, len(made), size.shard_rows)
        ]
        tasks = rows.features_tasks(directory, shards)
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
    """Build the frozen target of Mistral-7B's shape, with random weights drawn on the device."""
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as `load_causal_lm` does
    config = MistralConfig(**size.shape, sliding_window=None, tie_word_embeddings=False)
    with size.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def lm_head_alone(model: PreTrainedModel, directory: Path) -> TargetSpec:
    """Write the target's configuration and lm_head, the only target files that training reads."""
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
