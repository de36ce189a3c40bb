"""What a tree costs on the device at hand: seconds of a Medusa step over seconds of a plain one, by tree size.

A step costs the same whatever it accepts, so a few steps of each size tell; the sizes take turns, round by round, so
that a machine that drifts slows them all. A tree that costs more than it can ever give is given up after one round.
On a CPU plain decoding chooses the number of threads, and all compute with as many.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from time import perf_counter

import torch
from transformers import PreTrainedModel

from pipeline.medusa.decoding import MedusaDecoder, plain_decoder
from pipeline.medusa.heads import MedusaHeads
from pipeline.medusa.tree import Path

NUM_STEPS, NUM_ROUNDS = 12, 4
LONG_STEP = 0.1  # seconds


def overhead_curve(
    model: PreTrainedModel,
    heads: MedusaHeads,
    trees: Mapping[int, Sequence[Path]],
    prompt_ids: Sequence[int],
    max_length: int,
) -> dict[int, float]:
    """The overhead of each tree, named by its number of nodes, behind a prompt of a usual length.

    Left out are trees that cost more plain steps than they are deep, and one: they keep no more tokens than that. The
    smallest one is always there.
    """
    # Room for the steps that are taken and no more: every decoder has a cache of its own.
    deepest = max(len(path) for choices in trees.values() for path in choices)
    length = min(max_length, len(prompt_ids) + 1 + NUM_STEPS * (deepest + 1))
    plain = plain_decoder(model, eos_token_ids=(), max_length=length)
    with fastest_threads(plain, prompt_ids):
        seconds: dict[int, list[float]] = {0: []}
        decoders = {0: plain}
        plain_seconds = _seconds_per_step(plain, prompt_ids, length)
        for size, choices in sorted(trees.items()):
            decoder = MedusaDecoder(model, heads, choices, eos_token_ids=(), max_length=length)
            if _seconds_per_step(decoder, prompt_ids, length) > (deepest + 1) * plain_seconds and len(decoders) > 1:
                break
            decoders[size], seconds[size] = decoder, []
        for _ in range(NUM_ROUNDS):
            for size, decoder in decoders.items():
                seconds[size].append(_seconds_per_step(decoder, prompt_ids, length))
    medians = {size: statistics.median(taken) for size, taken in seconds.items()}
    return {size: medians[size] / medians[0] for size in medians if size}


def overheads(
    plain: MedusaDecoder, others: Mapping[str, MedusaDecoder], prompts: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Seconds of each decoder's steps over plain ones behind the same prompt; the median over the prompts.

    End tokens end nothing here: a decoder that keeps some is measured all the same.
    """
    plain = plain_decoder(plain.model, eos_token_ids=(), max_length=plain.max_length)
    ratios: dict[str, list[float]] = {name: [] for name in others}
    endless = {name: with_tree(other, other.tree.choices) for name, other in others.items()}
    for prompt_ids in [prompts[0], *prompts]:  # the first one is the warm-up
        plainly = _seconds_per_step(plain, prompt_ids, plain.max_length)
        for name, decoder in endless.items():
            ratios[name].append(_seconds_per_step(decoder, prompt_ids, decoder.max_length) / plainly)
    return {name: statistics.median(found[1:]) for name, found in ratios.items()}


def with_tree(medusa: MedusaDecoder, choices: Sequence[Path], eos_token_ids: Collection[int] = ()) -> MedusaDecoder:
    """The same target and heads with another tree; without end tokens, unless some are given."""
    return MedusaDecoder(medusa.model, medusa.heads, choices, eos_token_ids=eos_token_ids, max_length=medusa.max_length)


@contextlib.contextmanager
def fastest_threads(plain: MedusaDecoder, prompt_ids: Sequence[int]) -> Iterator[int]:
    """Let torch compute with as many CPU threads as make plain steps fastest. On a GPU there is nothing to choose.

    For a small target that is fewer than there are cores: after each of its hundreds of short operations the threads
    wait for one another, and longest where the cores have other work. Tried are all, half of them, …, 1, in turns. A
    target whose steps are long has work for all of them, and to try would take minutes.
    """
    most = torch.get_num_threads()
    if plain.device.type != "cpu":
        yield most
        return
    length = min(plain.max_length, len(prompt_ids) + 1 + NUM_STEPS)
    seconds: dict[int, list[float]] = {most >> halvings: [] for halvings in range(most.bit_length())}
    try:
        first = _seconds_per_step(plain, prompt_ids, length)  # the very first forwards are slow
        for _ in range(NUM_ROUNDS if first < LONG_STEP else 0):
            for threads, taken in seconds.items():
                torch.set_num_threads(threads)
                taken.append(_seconds_per_step(plain, prompt_ids, length))
        best = min(seconds, key=lambda threads: statistics.median(seconds[threads] or [0.0]))  # untried: all
        torch.set_num_threads(best)
        yield best
    finally:
        torch.set_num_threads(most)


def _seconds_per_step(decoder: MedusaDecoder, prompt_ids: Sequence[int], length: int) -> float:
    steps = decoder.stream(prompt_ids, length - len(prompt_ids))
    next(steps)  # the prefill
    started = perf_counter()
    taken = sum(1 for _ in itertools.islice(steps, NUM_STEPS))
    return (perf_counter() - started) / max(1, taken)
