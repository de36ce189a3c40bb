"""Format numbers the same way in every output, and make texts safe for terminals."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import itemgetter

UNKNOWN = "-"

CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
CONTROLS[0x7F] = 0x2421
CONTROLS.update(dict.fromkeys(range(0x80, 0xA0), 0xFFFD))


def show(value: float | str | None, spec: str, suffix: str = "") -> str:
    """Format a number by a format spec and add a suffix; None becomes `-`, a text is unchanged."""
    if isinstance(value, str):
        return value
    return UNKNOWN if value is None else f"{value:{spec}}{suffix}"


count = partial(show, spec=",.0f")  # 12,345
ratio = partial(show, spec=".2f")  # 2.31
times = partial(show, spec=".2f", suffix="x")  # 1.96x
percent = partial(show, spec=".1%")  # a share of one: 78.9%
signed_percent = partial(show, spec="+.1%")  # a change as a share of one: +1.2%


def quotient(value: float | None, unit: float | None) -> float | None:
    """Return a value relative to a unit; None if either is unknown or the unit is 0."""
    return value / unit if value is not None and unit else None


def with_error(value: float | None, standard_error: float | None) -> str:
    """Format a rate with its standard error, if known: `4.03 ± 0.32`."""
    if standard_error is None:
        return ratio(value)
    return f"{ratio(value)} ± {ratio(standard_error)}"


def rate(value: float | None) -> str:
    """Format tokens per second; a float below 100 has one decimal, and None becomes `-`."""
    if isinstance(value, float) and value < 100:
        return show(value, ".1f")
    return count(value)


def counts(numbers: Mapping[str, int]) -> str:
    """Format counts by name, the largest first: `too-long 6, empty 4`."""
    largest = sorted(numbers.items(), key=itemgetter(1), reverse=True)
    return ", ".join(f"{name} {count(number)}" for name, number in largest)


def duration(seconds: float | None) -> str:
    """Format seconds in readable units: `34 ms`, `4.1 s`, `48 s`, `3 min 20 s`, `2 h 05 min`.

    None becomes `-`.
    """
    if seconds is None:
        return UNKNOWN
    if 0 < seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def visible(text: str) -> str:
    """Replace all control characters except tab and newline by symbols.

    A terminal prints the symbols, and would execute the control characters.
    """
    return text.translate(CONTROLS)
