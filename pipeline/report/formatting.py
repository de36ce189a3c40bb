"""Number formats of reports, the same in every form (`-` for an unknown number), and texts that a
terminal may show.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

NOT_RUN = "not run"
UNKNOWN = "-"

CONTROLS = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
    | {0x7F: 0x2421}
    | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
)


def show(value: Any, spec: str, suffix: str = "") -> str:
    """A number in a format; anything else as it is, None as `-`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:{spec}}{suffix}" if is_number else UNKNOWN if value is None else str(value)


count = partial(show, spec=",.0f")  # 12,345
ratio = partial(show, spec=".2f")  # 2.31
times = partial(show, spec=".2f", suffix="x")  # 1.96x
percent = partial(show, spec=".1%")  # a share of one: 78.9%
signed_percent = partial(show, spec="+.1%")  # a change as a share of one: +1.2%


def with_error(value: Any, standard_error: Any) -> str:
    """A rate with its standard error: `4.03 ± 0.32`; alone where the error is unknown."""
    return ratio(value) if standard_error is None else f"{ratio(value)} ± {ratio(standard_error)}"


def rate(value: Any) -> str:
    """Tokens per second: one decimal below 100, none above."""
    return show(value, ".1f" if isinstance(value, float) and value < 100 else ",.0f")


def escaped(text: str) -> str:
    """Text for Markdown: on one line, with every special character escaped."""
    return re.sub(r"([\\`*_\[\]<>|~&#])", r"\\\1", " ".join(text.split()))


def duration(seconds: Any) -> str:
    """Seconds in readable units: `34 ms`, `4.1 s`, `48 s`, `3 min 20 s`, `2 h 05 min`."""
    if not isinstance(seconds, (int, float)):
        return UNKNOWN
    if 0 < seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def on_threads(number: Any) -> str:
    """` on 2 CPU threads`; nothing where their number is not known."""
    return f" on {number} CPU thread{'s' if number != 1 else ''}" if isinstance(number, int) else ""


def pairs(value: Any) -> str:
    """A dictionary as `name value, name value`, a list joined by commas, anything else as it is."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items() if item is not None)
    return (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else ""
        if value is None
        else str(value)
    )


def visible(text: str) -> str:
    """The text with each control character replaced by its symbol, so that escape sequences have no
    effect.
    """
    return text.translate(CONTROLS)
