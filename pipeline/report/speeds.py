"""Comparison of decoding speeds by the ranges of their repeats.

One method is faster than another if its slowest repeat is faster than the other's fastest. If the
ranges overlap, the difference is within the repeats. With one repeat the range is unknown.

A step that drafts does more work than a plain step, so one request at a time gains at most the
acceleration rate. A batch has no such limit: it lasts as long as its longest answer, whose rate
may be higher than the other rates.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.artifacts.check_result import HEADS, PLAIN, Speed
from pipeline.formatting import UNKNOWN, rate, times

DISTURBED = 1.1  # a speedup over this many acceleration rates is due to other load


@dataclass(frozen=True)
class Repeats:
    """A method's tokens per second: the reported speed, the slowest repeat and the fastest.

    With one repeat all three are equal, and `is_single` is set.
    """

    method: str
    speed: float
    slowest: float
    fastest: float
    is_single: bool

    @classmethod
    def of(
        cls, method: str, speed: float | None, slowest_to_fastest: list[float] | None
    ) -> Repeats:
        """Return a method's speed with the range of its repeats."""
        speed = speed or 0.0
        slowest, fastest = slowest_to_fastest or (speed, speed)
        return cls(method, speed, slowest, fastest, slowest_to_fastest is None)

    @classmethod
    def of_heads(cls, found: Speed) -> Repeats:
        """Return the speed of decoding with heads in an engine's figures."""
        return cls.of(HEADS, found.tokens_per_second, found.range)

    @classmethod
    def of_plain(cls, found: Speed) -> Repeats:
        """Return the speed of plain decoding in an engine's figures."""
        return cls.of(PLAIN, found.baseline_tokens_per_second, found.baseline_range)

    def overlaps(self, other: Repeats) -> bool:
        """Return whether neither method is faster than the other in every repeat."""
        return self.slowest <= other.fastest and other.slowest <= self.fastest

    def over(self, other: Repeats) -> str:
        """Format the speedup over another method, which has a speed: `1.42x`."""
        return times(self.speed / other.speed)

    def range_over(self, other: Repeats) -> str:
        """Format the lowest and highest speedup over another method: `1.35 to 1.50`."""
        if self.is_single or other.is_single:
            return "one repeat"
        return f"{self.slowest / other.fastest:.2f} to {self.fastest / other.slowest:.2f}"


def speed_cell(speed: float | None, slowest_to_fastest: list[float] | None) -> str:
    """Format tokens per second with the range of the repeats, if known: `846 (811 to 854)`."""
    if slowest_to_fastest is None:
        return rate(speed)
    return f"{rate(speed)} ({range_cell(slowest_to_fastest)})"


def range_cell(slowest_to_fastest: list[float] | None) -> str:
    """Format the tokens per second of the slowest and fastest repeat: `811 to 854`, or `-`."""
    return " to ".join(map(rate, slowest_to_fastest or [])) or UNKNOWN


def is_disturbed(found: Speed) -> bool:
    """Return whether another process disturbed a measurement of one request at a time.

    If the speedup clearly exceeds the acceleration rate, another process has slowed the plain
    steps, and the speedup means nothing.
    """
    if found.speedup is None or found.acceleration_rate is None:
        return False
    return found.speedup > DISTURBED * found.acceleration_rate
