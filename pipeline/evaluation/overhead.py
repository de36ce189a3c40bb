"""Measure the overhead of trees: seconds of a step with heads over seconds of a plain step.

The steps run in the check's decoder on this device. A step takes the same time whatever it
accepts, so a few steps per prompt suffice. All sizes are measured in turns for each prompt, so that
changes in the machine's speed affect them alike. The time of a step is the lower quartile, which
interrupted steps hardly change. The first size that cannot be faster than plain decoding and all
larger sizes are left out. On a CPU all decoders use the number of threads at which plain decoding
is fastest.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from pipeline.artifacts.trained_heads import read_trained_heads
from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.tree import Choices
from pipeline.execution.progress import SILENT, ProgressReporter
from pipeline.heads.kind import Heads
from pipeline.targets.loading import input_device, load_on_gpus
from pipeline.targets.spec import TargetSpec, context_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Trees = Mapping[int, Choices | DynamicTree]  # by number of nodes, or of tokens of a chain

NUM_STEPS, NUM_PROMPTS = 8, 6
NUM_TRIALS = 3  # prompts on which a tree's step is compared with its limit
NUM_ROUNDS = 4  # per number of threads
LONG_STEP = 0.03  # seconds


def measure_overheads(
    target: TargetSpec,
    heads: Path,
    trees: Trees,
    chains: Trees,
    prompts: list[list[int]],
    gpus: int,
    progress: ProgressReporter = SILENT,
) -> tuple[dict[int, float], dict[int, float]]:
    """Load target and trained heads; return the overheads of trees and of chains, by size.

    `heads` is the path of the trained heads; `prompts` are token ids.
    """
    model = load_on_gpus(target, gpus)
    module = read_trained_heads(heads).to(input_device(model), model.dtype)
    room = context_length(target)
    return (
        overhead_curve(model, module, trees, prompts, room, progress),
        overhead_curve(model, module, chains, prompts, room, progress),
    )


def overhead_curve(
    model: PreTrainedModel,
    heads: Heads,
    trees: Trees,
    prompts: Sequence[Sequence[int]],
    max_length: int,
    progress: ProgressReporter = SILENT,
) -> dict[int, float]:
    """Measure the overhead of decoding with each tree, by number of nodes; empty without trees.

    If a step with a tree takes longer than `heads.shape.max_depth` + 1 plain steps, decoding with
    it cannot be faster than plain decoding. This tree and all larger ones are left out, but the
    smallest tree is always measured.

    Args:
        max_length: The limit of prompt and new tokens together.
    """
    if not trees:
        return {}
    deepest = heads.shape.max_depth
    # No more room than the steps need: every decoder allocates a cache.
    room = min(max_length, max(map(len, prompts)) + 1 + NUM_STEPS * (deepest + 1))
    plain = plain_decoder(model, eos_token_ids=(), max_length=room)
    with fastest_threads(plain, prompts[0]):
        decoders: dict[int, Decoder] = {}
        for size, choices in sorted(trees.items()):
            decoder = Decoder(model, heads, choices, eos_token_ids=(), max_length=room)
            if decoders and overheads(plain, {0: decoder}, prompts[:NUM_TRIALS])[0] > deepest + 1:
                break
            decoders[size] = decoder
        num_measured = len(prompts) * (1 + len(decoders))
        progress.begin(f"overheads of {len(decoders)} sizes", num_measured, unit="measurements")
        return overheads(plain, decoders, prompts, progress)


def overheads(
    plain: Decoder,
    others: Mapping[int, Decoder],
    prompts: Sequence[Sequence[int]],
    progress: ProgressReporter = SILENT,
) -> dict[int, float]:
    """Measure each decoder's overhead: its step time over a plain step's, without warm-up.

    An overhead is NaN if the context leaves no room for a step. The decoders must have no end
    tokens, since a text could end before its first step.
    """
    plainly = []
    seconds: dict[int, list[float]] = {name: [] for name in others}
    for prompt_ids in prompts:
        plainly += step_seconds(plain, prompt_ids)
        progress.advance()
        for name, decoder in others.items():
            seconds[name] += step_seconds(decoder, prompt_ids)
            progress.advance()
    return {
        name: lower_quartile(taken) / lower_quartile(plainly) for name, taken in seconds.items()
    }


def step_seconds(decoder: Decoder, prompt_ids: Sequence[int]) -> list[float]:
    """Measure the seconds of each of a decoder's first `NUM_STEPS` steps after the prefill.

    The list is shorter, or empty, if the context is full before.
    """
    steps = decoder.stream(prompt_ids, 1 + NUM_STEPS * (decoder.tree.max_depth + 1))
    next(steps)  # the prefill
    times = [perf_counter()]
    with contextlib.closing(steps):
        for _ in itertools.islice(steps, NUM_STEPS):
            times.append(perf_counter())
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def lower_quartile(seconds: Sequence[float]) -> float:
    """Return the lower quartile of step times, which outliers hardly change; NaN without times."""
    return sorted(seconds)[len(seconds) // 4] if seconds else math.nan


@contextlib.contextmanager
def fastest_threads(plain: Decoder, prompt_ids: Sequence[int]) -> Iterator[None]:
    """Context manager that sets the number of CPU threads at which plain steps are fastest.

    The earlier number is restored at the end. On a GPU nothing is changed. All threads, half of
    them, a quarter and so on to 1 are tried in turns. If steps take `LONG_STEP` or longer, all
    threads are kept, since trying would take minutes. A small target is often fastest with fewer
    threads than cores, because threads synchronize after each of hundreds of short operations. With
    one thread there is nothing to try.
    """
    most = torch.get_num_threads()
    if plain.device.type != "cpu":
        yield
        return
    seconds: dict[int, list[float]] = {
        most >> halvings: [] for halvings in range(most.bit_length())
    }
    best = most
    try:
        first = lower_quartile(step_seconds(plain, prompt_ids))  # the first forwards are slow
        if most > 1 and first < LONG_STEP:
            for _ in range(NUM_ROUNDS):
                for threads, taken in seconds.items():
                    torch.set_num_threads(threads)
                    taken += step_seconds(plain, prompt_ids)
            best = min(seconds, key=lambda threads: lower_quartile(seconds[threads]))
        torch.set_num_threads(best)
        yield
    finally:
        torch.set_num_threads(most)
