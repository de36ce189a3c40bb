"""The picture of a tree: what one step verifies, and how likely each guess is to be kept (paper, section 2.3.3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve

from pipeline.report.drawing import ACCENT, CARD, INK, svg

Path = tuple[int, ...]
Place = tuple[int, int]


def layout(choices: Sequence[Sequence[int]]) -> dict[Path, Place]:
    """Every node's place as (depth, line): a first child stays on its parent's line, a further one takes a new line.

    The path of first guesses thus runs straight along the top. The root, and any prefix that `choices` leave out, are
    placed too.
    """
    places: dict[Path, Place] = {}
    line, parents = 0, set()
    for node in sorted({tuple(path[:depth]) for path in choices for depth in range(len(path) + 1)}):
        if node:  # lexicographic order: a parent comes right before its first child
            line += node[:-1] in parents
            parents.add(node[:-1])
        places[node] = (len(node), line)
    return places


def tree(choices: Sequence[Sequence[int]], probabilities: Sequence[float | None] = ()) -> str:
    """The tree from left to right, one column per head; area and colour of a node: the share of steps that keep it."""
    places = layout(choices)
    known = {tuple(path): p or 0.0 for path, p in zip(choices, probabilities, strict=True)} if probabilities else {}
    shares = {node: known.get(node, 0.0 if known and node else 1.0) for node in places}
    depth = max(map(len, places))
    num_lines = 1 + max(line for _, line in places.values())
    height = 0.7 + min(0.15 * max(num_lines, 6), 12)  # inches; the lines of a tree of hundreds of nodes stand closer

    def draw(axes: Axes) -> None:
        for node, place in places.items():
            if node:
                _edge(axes, places[node[:-1]], place, shares[node])
        _nodes(axes, places, shares)
        axes.set_xlim(-0.15, depth + 0.4)
        axes.set_ylim(num_lines - 0.3, -1)
        axes.set_xticks(range(depth + 1), ["token", *(f"head {k}" for k in range(depth))])
        axes.xaxis.tick_top()
        axes.tick_params(axis="both", length=0)
        axes.set_yticks([])
        axes.grid(False)
        axes.spines[:].set_visible(False)

    return svg("tree", f"Tree of {len(choices)} nodes and depth {depth}", height, draw)


def _edge(axes: Axes, start: Place, end: Place, share: float) -> None:
    (x0, y0), (x1, y1) = start, end
    curve = Curve([(x0, y0), (x0 + 0.5, y0), (x0 + 0.4, y1), (x1, y1)], [Curve.MOVETO, *[Curve.CURVE4] * 3])
    alpha = 0.2 + 0.5 * share**0.5
    axes.add_patch(PathPatch(curve, facecolor="none", edgecolor=ACCENT, alpha=alpha, linewidth=0.9 + 5 * share))


def _nodes(axes: Axes, places: dict[Path, Place], shares: dict[Path, float]) -> None:
    x_N, y_N = np.array(list(places.values()), dtype=float).T
    share_N = np.array(list(shares.values()))
    area_N = 20 + 200 * share_N
    axes.scatter(x_N, y_N, area_N, color=CARD, zorder=3, linewidth=0)  # hides the edges behind a translucent node
    dots = axes.scatter(x_N, y_N, area_N, color=ACCENT, zorder=4, linewidth=0)
    dots.set_alpha(0.3 + 0.7 * np.sqrt(share_N))
    for node, x, y, share in zip(places, x_N, y_N, share_N, strict=True):
        if node and share >= 0.02:
            offset = (0.5 * np.sqrt(20 + 200 * share) + 2, 4)
            axes.annotate(f"{share:.0%}", (x, y), offset, textcoords="offset points", color=INK, size=8)
