"""What a tree costs on the device at hand: seconds of a Medusa step over seconds of a plain one, by tree size.

It is measured where the check measures it: the same loop begins answers to held-out prompts. A step costs the same
whatever it accepts, so a few behind every prompt tell. The sizes take turns prompt by prompt, so that a machine that
drifts slows them all, and of each one's steps the lower quartile counts: those that other work has interrupted do not.
A tree that costs more than it can ever give is given up beforehand. On a CPU plain decoding chooses the number of
threads, and all compute with as many.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.tree import Path
from pipeline.heads.kind import Heads

Name = TypeVar("Name", bound=Hashable)
NUM_STEPS, NUM_PROMPTS = 8, 6
NUM_ROUNDS = 4  # of every number of threads
NUM_TRIALS = 3  # before a tree is given up: a machine may be busy once
LONG_STEP = 0.03  # seconds


def overhead_curve(
    model: PreTrainedModel,
    heads: Heads,
    trees: Mapping[int, Sequence[Path]],
    prompts: Sequence[Sequence[int]],
    max_length: int,
) -> dict[int, float]:
    """The overhead of each tree, named by its number of nodes, behind prompts such as the check asks.

    Left out are trees that cost more plain steps than they are deep, and one: they keep no more tokens than that. The
    smallest one is always there.
    """
    deepest = max(len(path) for choices in trees.values() for path in choices)
    # Room for the steps that are taken and no more: every decoder has a cache of its own.
    room = min(max_length, max(map(len, prompts)) + 1 + NUM_STEPS * (deepest + 1))
    plain = plain_decoder(model, eos_token_ids=(), max_length=room)
    with fastest_threads(plain, prompts[0]):
        most = (deepest + 1) * undisturbed(step_seconds(plain, prompts[0]))
        decoders: dict[int, Decoder] = {}
        for size, choices in sorted(trees.items()):
            decoder = Decoder(model, heads, choices, eos_token_ids=(), max_length=room)
            if decoders and all(undisturbed(step_seconds(decoder, prompts[0])) > most for _ in range(NUM_TRIALS)):
                break
            decoders[size] = decoder
        return overheads(plain, decoders, prompts)


def overheads(plain: Decoder, others: Mapping[Name, Decoder], prompts: Sequence[Sequence[int]]) -> dict[Name, float]:
    """Seconds of each decoder's step over those of a plain one, behind the same prompts; all are warmed up.

    Decoders without end tokens, or a text may end before its first step.
    """
    plainly: list[float] = []
    seconds: dict[Name, list[float]] = {name: [] for name in others}
    for prompt_ids in prompts:
        plainly += step_seconds(plain, prompt_ids)
        for name, decoder in others.items():
            seconds[name] += step_seconds(decoder, prompt_ids)
    return {name: undisturbed(taken) / undisturbed(plainly) for name, taken in seconds.items()}


def step_seconds(decoder: Decoder, prompt_ids: Sequence[int]) -> list[float]:
    """Of each of the first steps behind a prompt, the prefill apart; as many as there is room for."""
    steps = decoder.stream(prompt_ids, 1 + NUM_STEPS * (decoder.tree.max_depth + 1))
    next(steps)  # the prefill
    times = [perf_counter()]
    with contextlib.closing(steps):
        for _ in itertools.islice(steps, NUM_STEPS):
            times.append(perf_counter())
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile; NaN where there was room for no step."""
    return sorted(seconds)[len(seconds) // 4] if seconds else math.nan


def with_tree(medusa: Decoder, choices: Sequence[Path]) -> Decoder:
    """The same target and heads with another tree, and without end tokens."""
    return Decoder(medusa.model, medusa.heads, choices, eos_token_ids=(), max_length=medusa.max_length)


@contextlib.contextmanager
def fastest_threads(plain: Decoder, prompt_ids: Sequence[int]) -> Iterator[int]:
    """Let torch compute with as many CPU threads as make plain steps fastest. On a GPU there is nothing to choose.

    For a small target that may be fewer than there are cores: after each of its hundreds of short operations the
    threads wait for one another, and longest where the cores have other work. Tried are all, half of them, …, 1, in
    turns. A target whose steps are long has work for all of them, and to try would take minutes.
    """
    most = torch.get_num_threads()
    if plain.device.type != "cpu":
        yield most
        return
    seconds: dict[int, list[float]] = {most >> halvings: [] for halvings in range(most.bit_length())}
    try:
        first = undisturbed(step_seconds(plain, prompt_ids))  # the very first forwards are slow
        for _ in range(NUM_ROUNDS if first < LONG_STEP else 0):
            for threads, taken in seconds.items():
                torch.set_num_threads(threads)
                taken += step_seconds(plain, prompt_ids)
        best = min(seconds, key=lambda threads: undisturbed(seconds[threads] or [0.0]))  # untried: all
        torch.set_num_threads(best)
        yield best
    finally:
        torch.set_num_threads(most)
