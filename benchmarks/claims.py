"""Claims of benchmarks, and timing of the compared sides in turns.

Sides take turns, A B A B, so that a change of the machine's speed affects both. A side's figure is
its median. A missed aim raises no error: it is reported like one that is met.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

Side = Callable[[], float]  # does the side's work once; returns seconds


@dataclass(frozen=True)
class Claim:
    """A figure measured by a benchmark; `aim` is a lower bound, or an upper one with `at_most`."""

    what: str
    measured: float
    unit: str = "×"
    aim: float | None = None
    at_most: bool = False
    spread: tuple[float, float] | None = None  # least and most over the rounds
    sides: Mapping[str, float] = field(
        default_factory=dict
    )  # the underlying values, with units in their names

    @property
    def met(self) -> bool | None:
        if self.aim is None:
            return None
        return self.measured <= self.aim if self.at_most else self.measured >= self.aim


@dataclass(frozen=True)
class Result:
    """The result of a benchmark: claims for the table, and facts to reproduce it."""

    claims: Sequence[Claim]
    facts: Mapping[str, Any] = field(default_factory=dict)
    not_measured: Sequence[str] = ()  # claims that were left out for lack of time


def in_turns(
    sides: Mapping[str, Side],
    rounds: int,
    *,
    warm_up: bool = True,
    ends: Callable[[], bool] = lambda: False,
) -> dict[str, list[float]]:
    """Time the sides of a benchmark in turns; return the seconds of each round by side.

    A warm-up round is not counted. After the first round, no round begins once `ends()` is true.
    """
    if warm_up:
        for side in sides.values():
            side()
    timed: list[dict[str, float]] = []
    while len(timed) < rounds and not (timed and ends()):
        timed.append({name: side() for name, side in sides.items()})
    return {name: [one[name] for one in timed] for name in sides}


def rates(work: float, seconds: Sequence[float]) -> list[float]:
    """Return `work` per second in each round of a benchmark."""
    return [work / each for each in seconds]


def ratio(
    what: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    sides: Mapping[str, float],
    **more: Any,
) -> Claim:
    """Return the claim of our median rate over theirs, with the least and largest ratio of a round.

    The ratio is in percent if `unit` is "%".
    """
    scale = 100.0 if more.get("unit") == "%" else 1.0
    per_round = [scale * one / other for one, other in zip(ours, theirs, strict=True)]
    measured = scale * median(ours) / median(theirs)
    return Claim(what, measured, spread=(min(per_round), max(per_round)), sides=sides, **more)


def speed_ratio(
    what: str,
    seconds: Mapping[str, Sequence[float]],
    work: float,
    unit: str,
    aim: float | None = None,
) -> Claim:
    """Return the claim of the first side's speed over the second side's.

    Args:
        seconds: The seconds of each round, by side.
        work: The work of a round, in `unit`.
    """
    by_side = {name: rates(work, each) for name, each in seconds.items()}
    ours, theirs = by_side.values()
    return ratio(
        what,
        ours,
        theirs,
        {f"{name}, {unit}/s": median(each) for name, each in by_side.items()},
        aim=aim,
    )
