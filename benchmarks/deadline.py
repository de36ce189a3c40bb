"""When the parts of a benchmark have to end, so that all of it ends in a bounded time.

A part looks between its rounds, so it ends at most one round late; the next one then has less. What
a part does not reach is said as not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter


@dataclass(frozen=True)
class Deadline:
    """A moment of a clock."""

    at: float
    clock: Callable[[], float] = perf_counter

    def __call__(self) -> bool:
        """Whether it has passed."""
        return self.clock() >= self.at

    def halfway(self) -> Deadline:
        """The middle between now and then."""
        now = self.clock()
        return replace(self, at=now + (self.at - now) / 2)


def deadlines(
    seconds: Mapping[str, float], clock: Callable[[], float] = perf_counter
) -> dict[str, Deadline]:
    """When each part ends, one after another from now on; what one leaves, those after it have."""
    end, found = clock(), {}
    for part, share in seconds.items():
        end += share
        found[part] = Deadline(end, clock)
    return found
