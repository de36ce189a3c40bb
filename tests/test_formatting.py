"""Numbers as people read them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.formatting import duration


@given(st.floats(0, 1e6))
def test_a_duration_is_within_its_last_unit(seconds):
    words = duration(seconds).split()
    sizes = {"ms": 0.001, "s": 1, "min": 60, "h": 3600}
    said = sum(
        float(number) * sizes[unit] for number, unit in zip(words[::2], words[1::2], strict=True)
    )
    within = {"h": 60, "min": 0.5, "s": 0.5 if seconds >= 9.95 else 0.05, "ms": 0.0005}
    assert (
        abs(said - seconds)
        <= within[next(unit for unit in ("h", "min", "s", "ms") if unit in words)] + 1e-9
    )
