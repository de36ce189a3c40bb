"""A benchmark's claims, each a measured figure with its aim, and the timing of two sides.

Sides take turns, A B A B, so that a drifting machine slows both; a side's figure is its median. A
missed aim raises
nothing: it is written down like one that was met.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

Side = Callable[[], float]  # works once; returns seconds


@dataclass(frozen=True)
class Claim:
    """One measured figure. `aim` is a lower bound, or with `at_most` an upper one; None for
    none.
    """

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
    """A benchmark's outcome: claims for the table, and facts for reproducing them."""

    claims: Sequence[Claim]
    facts: Mapping[str, Any] = field(default_factory=dict)
    not_measured: Sequence[str] = ()  # what there was no time for


def in_turns(
    sides: Mapping[str, Side],
    rounds: int,
    *,
    warm_up: bool = True,
    ends: Callable[[], bool] = lambda: False,
) -> dict[str, list[float]]:
    """Each side's seconds in each of `rounds` rounds, after one warm-up round that is not counted.

    Once it `ends`, there are no more rounds than the first.
    """
    if warm_up:
        for side in sides.values():
            side()
    timed: list[dict[str, float]] = []
    while len(timed) < rounds and not (timed and ends()):
        timed.append({name: side() for name, side in sides.items()})
    return {name: [one[name] for one in timed] for name in sides}


def rates(work: float, seconds: Sequence[float]) -> list[float]:
    """`work` per second, per round."""
    return [work / each for each in seconds]


def ratio(
    what: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    sides: Mapping[str, float],
    **more: Any,
) -> Claim:
    """Our median rate over theirs, with the least and the most of the rounds; in percent with
    `unit` "%".
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
    """The speed of the first of two sides over that of the second, for the same `work` counted in
    `unit`.
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
