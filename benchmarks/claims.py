"""What a benchmark says: claims, each a measured figure beside its aim; and how two sides are timed fairly.

Sides take turns, A B A B, so that a machine that drifts slows both, and a side's figure is its median. Nothing here
judges by an exception: an aim that was missed is written down like one that was met.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

Side = Callable[[], float]  # does its work once, by its own clock, and returns the seconds


@dataclass(frozen=True)
class Claim:
    """One measured figure. `aim` is a lower bound, or with `at_most` an upper one; None where it is only reported."""

    what: str
    measured: float
    unit: str = "×"
    aim: float | None = None
    at_most: bool = False
    spread: tuple[float, float] | None = None  # least and most over the rounds
    sides: Mapping[str, float] = field(default_factory=dict)  # what it was taken from, each with its unit in its name

    @property
    def met(self) -> bool | None:
        if self.aim is None:
            return None
        return self.measured <= self.aim if self.at_most else self.measured >= self.aim


@dataclass(frozen=True)
class Result:
    """A benchmark's outcome: claims for the table, and facts that a reader needs to repeat or doubt them."""

    claims: Sequence[Claim]
    facts: Mapping[str, Any] = field(default_factory=dict)


def in_turns(sides: Mapping[str, Side], rounds: int, *, warm_up: bool = True) -> dict[str, list[float]]:
    """Every side's seconds in each of `rounds` rounds; one round before them warms up and does not count."""
    if warm_up:
        for side in sides.values():
            side()
    timed = [{name: side() for name, side in sides.items()} for _ in range(rounds)]
    return {name: [one[name] for one in timed] for name in sides}


def rates(work: float, seconds: Sequence[float]) -> list[float]:
    """`work` per second, round by round."""
    return [work / each for each in seconds]


def ratio(what: str, ours: Sequence[float], theirs: Sequence[float], sides: Mapping[str, float], **more: Any) -> Claim:
    """Our median rate over theirs, and the least and the most of the rounds; in percent where `unit` says so."""
    scale = 100.0 if more.get("unit") == "%" else 1.0
    per_round = [scale * one / other for one, other in zip(ours, theirs, strict=True)]
    measured = scale * median(ours) / median(theirs)
    return Claim(what, measured, spread=(min(per_round), max(per_round)), sides=sides, **more)


def speed_ratio(
    what: str, seconds: Mapping[str, Sequence[float]], work: float, unit: str, aim: float | None = None
) -> Claim:
    """How many times as fast the first of two sides did the same `work` (counted in `unit`) as the second."""
    by_side = {name: rates(work, each) for name, each in seconds.items()}
    ours, theirs = by_side.values()
    return ratio(what, ours, theirs, {f"{name}, {unit}/s": median(each) for name, each in by_side.items()}, aim=aim)
