"""Drawings as SVG elements inside HTML.

Drawn by matplotlib through its object-oriented API. The same data gives the same bytes: no date, a
fixed salt for ids, the user's matplotlibrc ignored. Colours are CSS variables, so that one drawing
serves the light and the dark scheme; text stays text, in the page's font.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Placeholder colours; `_themed` replaces them by CSS variables.
INK, MUTED, LINE, CARD, ACCENT = (f"#0000{i:02x}" for i in range(1, 6))
SERIES = tuple(f"#0001{i:02x}" for i in range(6))
_VARIABLES = {INK: "ink", MUTED: "muted", LINE: "line", CARD: "card", ACCENT: "accent"}
_VARIABLES |= {colour: f"s{i}" for i, colour in enumerate(SERIES)}

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid.axis": "y",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.2,
    "lines.linewidth": 1.6,
}
_WIDTH = (
    5.0  # inches: 360 units, so that 10-unit text is 9 pixels high on a phone and 14 on a desktop
)


def svg(name: str, label: str, height: float, draw: Callable[[Axes], None]) -> str:
    """The drawing by `draw`, `height` inches high, as an `<svg>` element; its ids begin with
    `name`.
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS | {"svg.hashsalt": name})
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    return _themed(buffer.getvalue(), name, label)


def legend_above(axes: Axes, num_columns: int) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=num_columns)


def _themed(text: str, name: str, label: str) -> str:
    """The drawing without prologue and style sheet, with ids of its own and the page's colours and
    fonts.
    """
    text = text[text.index("<svg") :]
    view_box = re.search(r'viewBox="[^"]*"', text)
    assert view_box
    text = re.sub(
        r"<svg[^>]*>", f'<svg role="img" aria-label="{label}" {view_box[0]}>', text, count=1
    )
    # Coordinates are cut to a hundredth of a unit, less than a pixel.
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), text)
    text = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", text)
    return re.sub(
        r"#000[01][0-9a-f]{2}", lambda found: f"var(--{_VARIABLES.get(found[0], 'ink')})", text
    ).strip()
