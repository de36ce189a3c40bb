"""Deadlines for the parts of a benchmark, so that the whole benchmark ends in a bounded time.

A part checks its deadline between rounds, so it ends at most one round late, and the next part has
less time. Claims that a part does not reach are reported as not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter


@dataclass(frozen=True)
class Deadline:
    """The time by which a part of a benchmark ends, on the given clock."""

    at: float
    clock: Callable[[], float] = perf_counter

    def __call__(self) -> bool:
        """Return whether the deadline has passed."""
        return self.clock() >= self.at

    def halfway(self) -> Deadline:
        """Return a deadline halfway between now and this one."""
        now = self.clock()
        return replace(self, at=now + (self.at - now) / 2)


def deadlines(
    seconds: Mapping[str, float], clock: Callable[[], float] = perf_counter
) -> dict[str, Deadline]:
    """Return the deadlines of a benchmark's parts, which run one after another from now on.

    A part that ends early leaves its time to later parts.
    """
    end, found = clock(), {}
    for part, share in seconds.items():
        end += share
        found[part] = Deadline(end, clock)
    return found
