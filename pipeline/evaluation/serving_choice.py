"""Choice of what to serve: the method of vLLM with the highest mean speedup over plain decoding.

Drafting pays less the more requests there are, so loads are judged in two groups and not one by
one. The lower group ends where the total gain of a method is largest. Speedups below `NOISE` are no
gain. A method is faster in every repeat if its slowest one is faster than the fastest one of
plain decoding. A speed counts as far as its requests are within `check.slo`.

Methods are measured one after another, so other work on the machine may slow one of them and not
the next. A step that drafts does more work than a plain step, so a method's speedup over plain
decoding is at most its acceleration rate. Loads at which a method exceeds this are disturbed, and
are not judged. A method whose greedy text is not the target's is never chosen.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pipeline.artifacts.check_result import (
    HEADS,
    PLAIN,
    LoadRow,
    ServedMethod,
    ServingAdvice,
    ServingChoice,
    VllmFigures,
)
from pipeline.formatting import times
from pipeline.report.facts import DISTURBED, ENOUGH_PROMPTS, MANY_SEEN

LEAST = 1e-9  # tokens per second, instead of none
MOST = 4.0  # largest factor that a gain or loss at one load counts as
NOISE = 1.05  # a smaller speedup is none
CHECK_FIRST = ServingAdvice(
    loads="before you serve",
    text=f"What follows is rough: the check has fewer than {ENOUGH_PROMPTS} prompts, or many of its"
    " answers are in the training text. Before you serve, check with 32 or more new questions like"
    " those of your users.",
    command="medusa-distill run RUN_DIR check.prompts=QUESTIONS.jsonl seeds.decontaminate=false",
)


class Speed(NamedTuple):
    """A method's useful tokens per second at one load, and their range over repeats."""

    method: str
    useful: float
    slowest: float
    fastest: float


Speeds = dict[str, Speed]  # at one load, by method; plain decoding is one of them


def disturbed_loads(rows: Sequence[LoadRow], methods: Sequence[ServedMethod]) -> list[int]:
    """Return the loads at which a method's speedup is far above its acceleration rate."""
    rates = {method.name: method.acceleration_rate for method in methods}
    found = set()
    for row in rows:
        rate = rates.get(row.method)
        if rate and row.speedup and row.speedup > DISTURBED * rate:
            found.add(row.requests)
    return sorted(found)


def speeds_by_load(rows: Sequence[LoadRow]) -> dict[int, Speeds]:
    """Return the speeds at each load at which any method has a request within `check.slo`.

    Loads ascend, and at each the method of the first row comes first. `rows` are those of all
    methods at all loads that are judged.
    """
    found: dict[int, Speeds] = {}
    for row in sorted(rows, key=lambda row: row.requests):
        speeds = found.setdefault(row.requests, {})
        speeds[row.method] = _speed(row.method, row.tokens_per_second, row.within_slo, row.range)
        speeds[PLAIN] = _speed(
            PLAIN, row.baseline_tokens_per_second, row.baseline_within_slo, row.baseline_range
        )
    return {
        load: speeds
        for load, speeds in found.items()
        if any(speed.useful for speed in speeds.values())
    }


def _speed(
    method: str,
    tokens_per_second: float | None,
    within_slo: float | None,
    spread: list[float] | None,
) -> Speed:
    """Return a method's speed at one load.

    Without limits all tokens are useful; with limits, those of the share of requests within them,
    which is that of the reported repeat. With one repeat, its speed is the slowest and fastest.
    """
    speed = tokens_per_second or 0.0
    share = 1.0 if within_slo is None else within_slo
    slowest, fastest = spread or (speed, speed)
    return Speed(method, share * speed, share * slowest, share * fastest)


def serving_choice(requests: int, speeds: Speeds) -> ServingChoice:
    """Return the fastest method at one load, and the second."""
    best, second, *_ = sorted(speeds.values(), key=lambda speed: -speed.useful)
    margin = None
    if second.useful:
        margin = round(best.useful / second.useful - 1, 4)
    return ServingChoice(
        requests=requests,
        method=best.method,
        second=second.method,
        margin=margin,
        is_beyond_scatter=best.slowest > second.fastest,
    )


def _speedup(speeds: Speeds, method: str, other: str = PLAIN) -> float:
    """Return a method's speedup over another at one load.

    It is at most `MOST` and at least its inverse, so that no load decides alone.
    """
    speedup = speeds[method].useful / max(speeds[other].useful, LEAST)
    return min(max(speedup, 1 / MOST), MOST)


def total_gain(loads: Sequence[Speeds], method: str, other: str = PLAIN) -> float:
    """Return how much a method gains over another: logarithms of speedup over noise, summed."""
    return sum(math.log(_speedup(speeds, method, other) / NOISE) for speeds in loads)


def largest_gain(loads: Sequence[Speeds]) -> tuple[float, str]:
    """Return the total gain at the loads of the drafting method that gains most, and its name.

    The heads as they are exported are returned instead if they gain too, and the other method gains
    nothing over them.
    """
    gains = {name: total_gain(loads, name) for name in loads[0] if name != PLAIN}
    best = max(gains, key=lambda name: gains[name])
    if gains.get(HEADS, 0.0) > 0 and total_gain(loads, best, HEADS) <= 0:
        best = HEADS
    return gains[best], best


def serving_advice(
    by_load: Mapping[int, Speeds], methods: Sequence[ServedMethod]
) -> list[ServingAdvice]:
    """Return what to serve in each group of loads, and with one server for all loads.

    There must be a load, and all methods have the same loads.
    """
    configs = {each.name: each.speculative_config for each in methods}
    number = size_of_lower_group(list(by_load.values()))
    loads = list(by_load)
    groups = {_at_a_time(loads[:number]): loads[:number]}
    if number < len(loads):
        groups[_at_a_time(loads[number:])] = loads[number:]
        groups[f"One server for {_at_a_time(loads)}"] = loads
    advice = []
    for label, group in groups.items():
        method, verdict = _verdict({load: by_load[load] for load in group})
        command = _command(method, configs.get(method))
        text = f"{label}: serve {verdict}"
        advice.append(ServingAdvice(loads=label, text=text, command=command))
    return advice


def size_of_lower_group(loads: Sequence[Speeds]) -> int:
    """Return up to how many loads the total gain is largest; all loads if nothing gains."""
    numbers = range(1, len(loads) + 1)
    number = max(numbers, key=lambda number: largest_gain(loads[:number])[0])
    return number if largest_gain(loads[:number])[0] > 0 else len(loads)


def _verdict(loads: Mapping[int, Speeds]) -> tuple[str, str]:
    """Return the method to serve at some loads, and it and its gain in words."""
    speeds = list(loads.values())
    gain, best = largest_gain(speeds)
    if gain > 0:
        method, verdict = best, f"{best}, {_gain(speeds, best)}{_repeats(loads, best)}."
    else:
        method = PLAIN
        verdict = f"plain vLLM, since nothing gains 5 % on average: {best}, {_gain(speeds, best)}."
    if best != HEADS and HEADS in speeds[0]:
        verdict += f" Heads: {_gain(speeds, HEADS)}."
    return method, verdict


def _listed(loads: Sequence[int]) -> str:
    """List loads: `1`, `1 and 32`, `4, 8 and 16`."""
    *others, last = [f"{load:,}" for load in loads]
    return f"{', '.join(others)} and {last}" if others else last


def _at_a_time(loads: Sequence[int]) -> str:
    """Name loads: `1 and 32 at a time`."""
    return f"{_listed(loads)} at a time"


def _gain(loads: Sequence[Speeds], method: str) -> str:
    """Format a method's speedups at some loads: their geometric mean, and their range."""
    if not any(speeds[PLAIN].useful for speeds in loads):
        return "alone within check.slo"
    speedups = [_speedup(speeds, method) for speeds in loads]
    gain = f"{times(math.prod(speedups) ** (1 / len(speedups)))} plain vLLM"
    if len(speedups) > 1:
        gain += f" in the geometric mean ({times(min(speedups))} to {times(max(speedups))} by load)"
    return gain


def _repeats(loads: Mapping[int, Speeds], method: str) -> str:
    """Say at which loads a method is faster in every repeat; say nothing if it is at all loads."""
    certain = [load for load, each in loads.items() if each[method].slowest > each[PLAIN].fastest]
    if len(certain) == len(loads):
        return ""
    if certain:
        return f", faster than plain in every repeat at {_listed(certain)}"
    return ", but not in every repeat"


def _command(method: str, config: Mapping[str, Any] | None) -> str:
    """Return the command that serves a method, given its speculative configuration."""
    serve = "medusa-distill serve RUN_DIR"
    if method == HEADS:
        return serve
    if method == PLAIN or config is None:
        return f"{serve} --plain"
    if method.startswith(HEADS):
        return f"{serve} --draft-tokens {config['num_speculative_tokens']}"
    return f"{serve} --plain -- --speculative-config {shlex.quote(json.dumps(config))}"


def with_choices(figures: VllmFigures, rows: Sequence[LoadRow]) -> VllmFigures:
    """Add to vLLM's figures what to serve at the loads of `rows`, and say it in words."""
    methods = figures.methods or []
    disturbed = disturbed_loads(rows, methods)
    # Their greedy text differs from the target's other than at a tie.
    inexact = {each.name for each in methods if each.greedy_match and each.greedy_match.differing}
    judged = []
    for row in rows:
        if row.requests not in disturbed and row.method not in inexact:
            judged.append(row)
    by_load = speeds_by_load(judged)
    choices = [serving_choice(requests, speeds) for requests, speeds in by_load.items()]
    advice = []
    if by_load:
        few = figures.greedy_match.sequences < ENOUGH_PROMPTS
        if few or (figures.seen_share or 0) > MANY_SEEN:
            advice.append(CHECK_FIRST)
        advice += serving_advice(by_load, methods)
    if disturbed:
        loads = _at_a_time(disturbed)
        text = (
            f"{loads}: not known. A method gained more than the tokens that it adds to a step."
            " Either other work slowed one that it is compared with, or the answers were too short"
            " to time. Check again when the machine is idle, or with more prompts."
        )
        command = "medusa-distill run RUN_DIR --fresh check"
        advice.append(ServingAdvice(loads=loads, text=text, command=command))
    return replace(figures, choices=choices, advice=advice)
