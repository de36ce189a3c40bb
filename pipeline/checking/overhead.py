"""What a tree costs on the device at hand: seconds of a Medusa step over seconds of a plain one, by tree size.

A step costs the same whatever it accepts, so a few steps of each size tell; the sizes take turns, round by round, so
that a machine that drifts slows them all.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from time import perf_counter

from transformers import PreTrainedModel

from pipeline.medusa.decoding import MedusaDecoder, plain_decoder
from pipeline.medusa.heads import MedusaHeads
from pipeline.medusa.tree import Path

NUM_STEPS, NUM_ROUNDS = 16, 5


def overhead_curve(
    model: PreTrainedModel,
    heads: MedusaHeads,
    trees: Mapping[int, Sequence[Path]],
    prompt_ids: Sequence[int],
    max_length: int,
) -> dict[int, float]:
    """The overhead of each tree, named by its number of nodes, behind a prompt of a usual length."""
    decoders = {0: plain_decoder(model, eos_token_ids=(), max_length=max_length)}
    for size, choices in trees.items():
        decoders[size] = MedusaDecoder(model, heads, choices, eos_token_ids=(), max_length=max_length)
    seconds: dict[int, list[float]] = {size: [] for size in decoders}
    for _ in range(1 + NUM_ROUNDS):
        for size, decoder in decoders.items():
            seconds[size].append(_seconds_per_step(decoder, prompt_ids, max_length - len(prompt_ids)))
    medians = {size: statistics.median(taken[1:]) for size, taken in seconds.items()}  # the first round warms up
    return {size: medians[size] / medians[0] for size in trees}


def _seconds_per_step(decoder: MedusaDecoder, prompt_ids: Sequence[int], room: int) -> float:
    steps = decoder.stream(prompt_ids, room)
    next(steps)  # the prefill
    started = perf_counter()
    taken = sum(1 for _ in itertools.islice(steps, NUM_STEPS))
    return (perf_counter() - started) / max(1, taken)
