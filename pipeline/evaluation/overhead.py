"""Measure the overhead of trees: seconds of a step with heads over seconds of a plain step.

It is measured on this device, by tree size, with the check's own loop on held-out prompts. A step
costs the same whatever it accepts, so a few steps per prompt suffice. Sizes take turns for each
prompt, so that a drifting machine slows them all. The time of a size is the lower quartile of its
steps, which interrupted steps hardly move. From the first tree on that costs more than it can gain,
sizes are skipped. On a CPU all decoders use the number of threads at which plain decoding is
fastest.
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
from pipeline.evaluation.prompts import SILENT
from pipeline.execution.progress import ProgressReporter
from pipeline.heads.kind import Heads
from pipeline.targets.loading import input_device, load_on_gpus
from pipeline.targets.spec import TargetSpec, context_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Trees = Mapping[int, Choices | DynamicTree]  # by number of nodes, or of tokens of a chain

NUM_STEPS, NUM_PROMPTS = 8, 6
NUM_TRIALS = 3  # prompts, before a tree is skipped
NUM_ROUNDS = 4  # per number of threads
LONG_STEP = 0.03  # seconds


def measure_overheads(
    target: TargetSpec,
    heads: str,
    trees: Trees,
    chains: Trees,
    prompts: list[list[int]],
    gpus: int,
    progress: ProgressReporter = SILENT,
) -> tuple[dict[int, float], dict[int, float]]:
    """Load target and trained heads; measure the overheads of trees and of chains, by size."""
    model = load_on_gpus(target, gpus)
    module = read_trained_heads(Path(heads)).to(input_device(model), model.dtype)
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

    The prompts are of the same kind as the check's. A tree whose step costs more than max_depth + 1
    plain steps cannot gain: it and all larger trees are left out. The smallest tree is always
    measured.
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
        progress.begin(f"overheads of {len(decoders)} sizes", len(prompts))
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
    plainly: list[float] = []
    seconds: dict[int, list[float]] = {name: [] for name in others}
    for prompt_ids in prompts:
        plainly += step_seconds(plain, prompt_ids)
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
    """Return the lower quartile of measured step times, which interrupted steps hardly move.

    It is NaN without times.
    """
    return sorted(seconds)[len(seconds) // 4] if seconds else math.nan


@contextlib.contextmanager
def fastest_threads(plain: Decoder, prompt_ids: Sequence[int]) -> Iterator[int]:
    """Context manager: measure with the number of CPU threads at which plain steps are fastest.

    It yields this number, and restores the earlier one at the end. On a GPU nothing is changed. A
    small target is often fastest with fewer threads than cores: threads synchronise after each of
    hundreds of short operations, which takes longer if the cores have other work. All threads, half
    of them, a quarter and so on to 1 are tried in turns. A target with long steps keeps all
    threads, because trying would take minutes. With one thread there is nothing to try.
    """
    most = torch.get_num_threads()
    if plain.device.type != "cpu":
        yield most
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
        yield best
    finally:
        torch.set_num_threads(most)
