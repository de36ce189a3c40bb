"""Choice of what to serve: the fastest of vLLM's methods at each load, plain decoding included.

A method's speed counts as far as its requests are within `check.slo`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.artifacts.check_result import LoadRow, ServingChoice

PLAIN = "plain"


class Speed(NamedTuple):
    """A method's tokens per second at one load, the useful ones, and the range of its repeats."""

    method: str
    tokens_per_second: float
    useful: float
    range: list[float] | None


def serving_choices(rows: Sequence[LoadRow]) -> list[ServingChoice]:
    """Return the fastest method at each load at which any has a request within `check.slo`.

    `rows` are those of all methods at all loads.
    """
    by_load: dict[int, list[LoadRow]] = {}
    for row in rows:
        by_load.setdefault(row.requests, []).append(row)
    choices = []
    for requests, of_load in sorted(by_load.items()):
        first = of_load[0]
        plain = _speed(
            PLAIN, first.baseline_tokens_per_second, first.baseline_within_slo, first.baseline_range
        )
        speeds = [plain]
        for row in of_load:
            speeds.append(_speed(row.method, row.tokens_per_second, row.within_slo, row.range))
        speeds.sort(key=lambda speed: -speed.useful)
        if speeds[0].useful:
            choices.append(_choice(requests, plain, *speeds[:2]))
    return choices


def _speed(
    method: str,
    tokens_per_second: float | None,
    within_slo: float | None,
    range: list[float] | None,
) -> Speed:
    """Return a method's speed at one load; without limits all of its tokens are useful."""
    speed = tokens_per_second or 0.0
    share = 1.0 if within_slo is None else within_slo
    return Speed(method, speed, share * speed, range)


def _choice(requests: int, plain: Speed, best: Speed, second: Speed) -> ServingChoice:
    """Return the choice of one load, given the fastest method and the second."""
    margin = None
    if second.useful:
        margin = round(best.useful / second.useful - 1, 4)
    is_beyond_scatter = None
    if best.range is not None and second.range is not None:
        is_beyond_scatter = best.range[0] > second.range[1]
    return ServingChoice(
        requests=requests,
        method=best.method,
        speedup=round(best.tokens_per_second / plain.tokens_per_second, 4),
        second=second.method,
        margin=margin,
        is_beyond_scatter=is_beyond_scatter,
    )
