"""Choice of what to serve: the fastest of vLLM's methods at each load, plain decoding included.

A method's speed counts as far as its requests are within `check.slo`. Methods are measured one
after another, so other work on the machine may slow one of them and not the next. A step that
drafts does more work than a plain step, so a method's speedup over plain decoding is at most its
acceleration rate. Loads at which a method exceeds this are disturbed, and have no choice.
A method whose greedy text is not the target's is never chosen.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
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
from pipeline.report.facts import DISTURBED

ONE_SERVER = "One server for all of these"


class Speed(NamedTuple):
    """A method's tokens per second at one load, the useful ones, and their range over repeats."""

    method: str
    tokens_per_second: float
    useful: float
    spread: list[float] | None


def disturbed_loads(rows: Sequence[LoadRow], methods: Sequence[ServedMethod]) -> list[int]:
    """Return the loads at which a method's speedup is far above its acceleration rate."""
    rates = {method.name: method.acceleration_rate for method in methods}
    found = set()
    for row in rows:
        rate = rates.get(row.method)
        if rate and row.speedup and row.speedup > DISTURBED * rate:
            found.add(row.requests)
    return sorted(found)


def inexact_methods(methods: Sequence[ServedMethod]) -> set[str]:
    """Return the methods with a greedy text that differs from the target's other than at a tie."""
    return {each.name for each in methods if each.greedy_match and each.greedy_match.differing}


def serving_choices(rows: Sequence[LoadRow]) -> list[ServingChoice]:
    """Return the fastest method at each load at which any has a request within `check.slo`.

    Only methods that are faster than plain decoding beyond the scatter of the repeats are chosen,
    as far as that is known; without one, the choice is plain decoding. `rows` are those of all
    methods at all loads that are not disturbed.
    """
    by_load: dict[int, list[LoadRow]] = {}
    for row in rows:
        by_load.setdefault(row.requests, []).append(row)
    choices = []
    for requests, of_load in sorted(by_load.items()):
        plain = _plain_speed(of_load[0])
        speeds = [plain, *map(_own_speed, of_load)]
        if any(speed.useful for speed in speeds):
            choices.append(_choice(requests, plain, speeds))
    return choices


def _plain_speed(row: LoadRow) -> Speed:
    """Return the speed of plain decoding at the load of a row."""
    return _speed(
        PLAIN, row.baseline_tokens_per_second, row.baseline_within_slo, row.baseline_range
    )


def _own_speed(row: LoadRow) -> Speed:
    """Return the speed of a row's method."""
    return _speed(row.method, row.tokens_per_second, row.within_slo, row.range)


def _speed(
    method: str,
    tokens_per_second: float | None,
    within_slo: float | None,
    spread: list[float] | None,
) -> Speed:
    """Return a method's speed at one load; without limits all of its tokens are useful."""
    speed = tokens_per_second or 0.0
    share = 1.0 if within_slo is None else within_slo
    if spread is not None:
        spread = [share * each for each in spread]
    return Speed(method, speed, share * speed, spread)


def _choice(requests: int, plain: Speed, speeds: Sequence[Speed]) -> ServingChoice:
    """Return the choice of one load, given plain decoding's speed and all speeds."""
    ranked = sorted(speeds, key=lambda speed: -speed.useful)
    candidates = []  # faster than plain decoding, as far as is known
    for speed in ranked[: ranked.index(plain)]:
        if _is_beyond(speed, plain) is not False:
            candidates.append(speed)
    best, *_ = [*candidates, plain]
    second, *_ = [speed for speed in ranked if speed is not best]
    margin = None
    if second.useful:
        margin = round(best.useful / second.useful - 1, 4)
    return ServingChoice(
        requests=requests,
        method=best.method,
        speedup=round(_speedup(best, plain), 4),
        second=second.method,
        margin=margin,
        is_beyond_scatter=_is_beyond(best, second),
    )


def _speedup(speed: Speed, plain: Speed) -> float:
    """Return the speedup over plain decoding: that of useful tokens, if plain decoding has any."""
    if plain.useful:
        return speed.useful / plain.useful
    return speed.tokens_per_second / plain.tokens_per_second


def _is_beyond(faster: Speed, slower: Speed) -> bool | None:
    """Return whether all repeats of one are faster than those of the other; None for one repeat."""
    if faster.spread is None or slower.spread is None:
        return None
    return faster.spread[0] > slower.spread[1]


def serving_advice(
    choices: Sequence[ServingChoice], methods: Sequence[ServedMethod]
) -> list[ServingAdvice]:
    """Say in a sentence what to serve, and the command for it, for each chosen method."""
    chosen: dict[str, list[ServingChoice]] = {}
    for choice in choices:
        chosen.setdefault(choice.method, []).append(choice)
    advice = []
    for method, of_method in chosen.items():
        loads = _named([choice.requests for choice in of_method])
        verdict = _verdict(method, of_method)
        advice.append(_advice(loads, verdict, method, methods))
    return advice


def _advice(
    loads: str, verdict: str, method: str, methods: Sequence[ServedMethod]
) -> ServingAdvice:
    """Return the advice to serve a method at the named loads."""
    configs = {each.name: each.speculative_config for each in methods}
    command = _command(method, configs.get(method))
    return ServingAdvice(loads=loads, text=f"{loads}: {verdict}.", command=command)


def _named(loads: Sequence[int]) -> str:
    """Name loads: `1 at a time`, `1 and 32 at a time`, `4, 8 and 16 at a time`."""
    *others, last = [f"{load:,}" for load in loads]
    if others:
        last = f"{', '.join(others)} and {last}"
    return f"{last} at a time"


def _verdict(method: str, choices: Sequence[ServingChoice]) -> str:
    """Say what to serve at these loads, and by how much it is faster than plain decoding."""
    if method != PLAIN:
        return f"serve {method}, {_range([choice.speedup for choice in choices])} plain vLLM"
    verdict = "serve none, since no method is faster than plain vLLM"
    if choices[0].is_beyond_scatter is not None:
        verdict += " beyond the scatter of the repeats"
    margins = [(choice.margin, choice.second) for choice in choices if choice.margin is not None]
    if margins:
        margin, second = min(margins)
        verdict += f" ({second} came to {times(1 / (1 + margin))})"
    return verdict


def _range(speedups: Sequence[float]) -> str:
    """Format speedups: `1.29x`, `1.22x to 1.29x`."""
    lowest, highest = times(min(speedups)), times(max(speedups))
    return lowest if lowest == highest else f"{lowest} to {highest}"


def one_server(rows: Sequence[LoadRow], methods: Sequence[ServedMethod]) -> ServingAdvice:
    """Say what to serve if one server has all loads: the method of the highest mean speedup.

    It is the geometric mean over the loads. `rows` are as in `serving_choices`.
    """
    speedups: dict[str, list[float]] = {}
    for row in rows:
        speedups.setdefault(row.method, []).append(_speedup(_own_speed(row), _plain_speed(row)))
    means = {method: prod(of_all) ** (1 / len(of_all)) for method, of_all in speedups.items()}
    best = max(means, key=lambda method: means[method])
    gain = f"{times(means[best])} plain vLLM in the geometric mean, {_range(speedups[best])}"
    if means[best] > 1:
        return _advice(ONE_SERVER, f"serve {best}, {gain}", best, methods)
    return _advice(ONE_SERVER, f"serve none, since {best} comes to {gain}", PLAIN, methods)


def _command(method: str, config: Mapping[str, Any] | None) -> str:
    """Return the command that serves a method, given its speculative configuration."""
    serve = "medusa-distill serve RUN_DIR"
    if method == HEADS:
        return serve
    if method == PLAIN or config is None:
        return f"{serve} --plain"
    if method.startswith(HEADS):
        number = config["num_speculative_tokens"]
        return f"medusa-distill run RUN_DIR calibrate.draft_tokens={number} && {serve}"
    return f"{serve} --plain -- --speculative-config {shlex.quote(json.dumps(config))}"


def with_choices(figures: VllmFigures, rows: Sequence[LoadRow]) -> VllmFigures:
    """Add to vLLM's figures what to serve at the loads of `rows`, and say it in words."""
    methods = figures.methods or []
    disturbed = disturbed_loads(rows, methods)
    inexact = inexact_methods(methods)
    judged = []
    for row in rows:
        if row.requests not in disturbed and row.method not in inexact:
            judged.append(row)
    choices = serving_choices(judged)
    advice = serving_advice(choices, methods)
    if len(advice) > 1:
        advice.append(one_server(judged, methods))
    if disturbed:
        loads = _named(disturbed)
        text = (
            f"{loads}: not known. A method gained more than the tokens that it adds to a step."
            " Either other work slowed one that it is compared with, or the answers were too short"
            " to time. Check again when the machine is idle, or with more prompts."
        )
        command = "medusa-distill run RUN_DIR --fresh check"
        advice.append(ServingAdvice(loads=loads, text=text, command=command))
    return replace(figures, choices=choices, disturbed_loads=disturbed or None, advice=advice)
