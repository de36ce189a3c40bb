"""Plots of report.html, drawn by matplotlib as inline SVG elements.

The same data gives the same bytes: no date, a fixed salt for ids, the user's matplotlibrc ignored.
Colours are CSS variables, so that one plot serves the light and the dark scheme. Labels are SVG
text in the page's font. They contain no text from data, so they are not escaped.

Letters: K heads, N nodes of a tree, D coordinates of a node.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.decoding.tree import TreePath
from pipeline.report.report import CurvePoint, Extras

# Placeholder colours, replaced by CSS variables in `_render_svg`.
INK, MUTED, LINE, CARD, ACCENT = (f"#0000{i:02x}" for i in range(1, 6))
SERIES = tuple(f"#0001{i:02x}" for i in range(6))
VARIABLES = {INK: "ink", MUTED: "muted", LINE: "line", CARD: "card", ACCENT: "accent"}
VARIABLES.update({colour: f"s{i}" for i, colour in enumerate(SERIES)})
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "grid.color": LINE,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.markersize": 4,
}
WIDTH = 5.0  # inches: text of 10 units is 9 pixels high on a phone and 14 on a desktop
MAX_POINTS = 120  # per curve: keeps curves readable and the page small


def draw_plots(extras: Extras) -> dict[str, str]:
    """Draw the report's plots as `<svg>` elements, by name; plots without data are left out."""
    plots = {}
    calibration = extras.calibration
    with matplotlib.style.context(["default", SETTINGS]):
        if extras.losses:
            plots["losses"] = plot_head_losses(extras.losses, extras.held_out)
        if calibration and not calibration.dynamic:
            plots["tree"] = plot_tree(calibration.choices, calibration.node_shares)
        return {name: _render_svg(axes, name) for name, axes in plots.items()}


def _axes(x: str = "", y: str = "", height: float = 2.8) -> Axes:
    """Create the axes of a new plot of the report, `height` inches high, with axis labels."""
    axes = Figure(figsize=(WIDTH, height), layout="constrained").add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return axes


def _render_svg(axes: Axes, name: str) -> str:
    """Render a plot of the report as an `<svg>` element without style sheet.

    Colours become CSS variables, and ids are prefixed with `name`.
    """
    figure = axes.get_figure(root=True)
    assert figure
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside upper center", ncols=3)
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    view_box = re.search(r'viewBox="[^"]*"', text)
    assert view_box
    opening = f'<svg role="img" aria-label="plot of {name}" {view_box[0]}>'
    text = re.sub(r".*?<svg[^>]*>", opening, text, count=1, flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"(\.\d\d)\d+", r"\1", text)  # a hundredth of a unit is less than a pixel
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return text.strip()


def plot_head_losses(steps: Sequence[CurvePoint], held_out: Sequence[CurvePoint]) -> Axes:
    """Plot each head's training loss by step, and its held-out loss dashed, for the report."""
    axes = _axes("optimizer step", "cross-entropy (nats)")
    for k in range(len(steps[-1].head_losses)):
        colour = SERIES[k % len(SERIES)]
        _plot_losses(axes, steps, k, color=colour, label=f"head {k}")
        _plot_losses(axes, held_out, k, color=colour, linestyle="--", marker="o")
    return axes


def _plot_losses(axes: Axes, points: Sequence[CurvePoint], k: int, **style: Any) -> None:
    """Plot one head's losses by step, for the report.

    If there are more than MAX_POINTS, means of neighbouring points are plotted.
    """
    curve = np.array([(point.step, point.head_losses[k]) for point in points], dtype=float)
    if len(curve) > MAX_POINTS:
        parts = np.array_split(curve, MAX_POINTS)
        curve = np.stack([part.mean(axis=0) for part in parts])
    axes.plot(*curve.T, **style)


# --- the tree (paper, section 2.3.3)


def tree_layout(choices: Sequence[TreePath]) -> dict[TreePath, tuple[int, int]]:
    """Return the (depth, line) of each node in the report's plot of the tree, with the root.

    A first child is on its parent's line, and further children get new lines below. So the path of
    first guesses is the top line.
    """
    places: dict[TreePath, tuple[int, int]] = {(): (0, 0)}
    line, parents = 0, set()
    for node in sorted(choices):  # a parent comes right before its first child
        line += node[:-1] in parents
        parents.add(node[:-1])
        places[node] = (len(node), line)
    return places


def plot_tree(choices: Sequence[TreePath], node_shares: Sequence[float]) -> Axes:
    """Plot the candidate tree from left to right, one column per head, for the report.

    A node's area and opacity show the share of steps that accept the node. The label of a column is
    the share of steps that accept any of the column's nodes. One plus the sum of these shares is
    the expected acceleration rate.
    """
    places = tree_layout(choices)
    shares = {(): 1.0, **dict(zip(choices, node_shares, strict=True))}
    column_shares = np.bincount(list(map(len, choices)), node_shares)[1:]
    names = ["token", *(f"head {k}\n{share:.0%}" for k, share in enumerate(column_shares))]
    num_lines = 1 + max(line for _, line in places.values())
    axes = _axes(height=0.7 + min(0.15 * max(num_lines, 6), 12))  # large trees have closer lines
    for node, place in places.items():
        edge_ND = np.array([places[node[:-1]], place])
        axes.plot(*edge_ND.T, color=LINE, linewidth=1 + 4 * shares[node], zorder=1)
        area, alpha = 20 + 200 * shares[node], 0.3 + 0.7 * shares[node] ** 0.5
        axes.scatter(*place, area, CARD, zorder=2)  # hides edges behind nodes
        axes.scatter(*place, area, ACCENT, zorder=3, alpha=alpha)
        if node and shares[node] >= 0.02:
            share = f"{shares[node]:.0%}"
            axes.annotate(share, place, (8, 4), textcoords="offset points", size=8)
    axes.set_xticks(range(len(names)), names)
    axes.xaxis.tick_top()
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return axes
