"""Plots of the heads, their training and their tree (paper, section 2.3.3); all text in them is
ours and ASCII.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.report.svg import ACCENT, CARD, INK, MUTED, SERIES, legend_above, svg

Path = tuple[int, ...]
Place = tuple[int, int]

_MAX_POINTS = 120  # per curve: keeps curves readable and the page small


def head_accuracy(heads: Sequence[dict]) -> str:
    """For each head, the share of held-out positions whose token is among its first k guesses, one
    band per k.
    """
    ranks = [
        rank for rank in range(1, 6) if any(head.get(f"top{rank}") is not None for head in heads)
    ]
    top_RK = np.array(
        [[head.get(f"top{rank}") for head in heads] for rank in ranks], dtype=float
    )  # R ranks, K heads

    def draw(axes: Axes) -> None:
        x = np.arange(len(heads))
        below = np.zeros(len(heads))
        for rank, top_K in zip(ranks, top_RK, strict=True):
            top_K = np.fmax(top_K, below)  # an unknown top-k adds nothing
            alpha = 1.0 if rank == ranks[0] else 0.55 * 0.72 ** (rank - 2)
            axes.bar(
                x,
                top_K - below,
                0.62,
                bottom=below,
                color=ACCENT,
                alpha=alpha,
                label=f"top-{rank}",
                linewidth=0,
            )
            below = top_K
        for i, (first, last) in enumerate(zip(top_RK[0], below, strict=True)):
            if np.isfinite(first) and first > 0.08:
                axes.text(
                    i,
                    first / 2,
                    f"{first:.0%}",
                    ha="center",
                    va="center",
                    color=CARD,
                    weight="bold",
                )
            axes.text(i, last + 0.015, f"{last:.0%}", ha="center", va="bottom", color=INK)
        axes.set_xticks(x, [f"head {i}\nt+{i + 2}" for i in x])
        axes.tick_params(axis="x", length=0)
        axes.set_ylim(0, 1.08)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        legend_above(axes, len(ranks))

    return svg("heads", "Accuracy of every head, top-1 to top-5", 3.4, draw)


def losses(steps: Sequence[dict], held_out: Sequence[dict] = ()) -> str:
    """Cross-entropy of every head over the training steps, held-out losses dashed.

    Each row is `{"step", "loss", "head_losses"}`; long runs are averaged down to a few hundred
    points.
    """
    num_heads = max((len(row.get("head_losses") or ()) for row in [*steps, *held_out]), default=0)

    def draw(axes: Axes) -> None:
        for rows, style, width in ((steps, "-", 1.3), (held_out, "--o", 1.6)):
            if not rows:
                continue
            step_N, loss_N, head_losses_NK = _curves(rows, num_heads)
            for k in range(num_heads):
                label = f"head {k}" if style == "-" else None
                colour = SERIES[k % len(SERIES)]
                axes.plot(
                    step_N,
                    head_losses_NK[:, k],
                    style,
                    color=colour,
                    linewidth=width,
                    label=label,
                    ms=3,
                )
            if not num_heads:
                label = "loss" if style == "-" else "held-out loss"
                axes.plot(step_N, loss_N, style[:2], color=ACCENT, label=label)
        num_names = num_heads + bool(held_out)
        if num_heads and held_out:
            axes.plot([], [], "--o", color=MUTED, ms=3, label="held-out")
        _over_steps(axes, "cross-entropy (nats)", num_names if num_names < 6 else 3)

    return svg("losses", "Loss of every head over the training steps", 3.0, draw)


def held_out_accuracy(held_out: Sequence[dict]) -> str:
    """Held-out top-1 accuracy of every head over the training steps; rows of `{"step",
    "head_top1"}`.
    """

    def draw(axes: Axes) -> None:
        step_N = np.array([row["step"] for row in held_out], dtype=float)
        top1_NK = np.array([row["head_top1"] for row in held_out], dtype=float)
        for k, top1_N in enumerate(top1_NK.T):
            axes.plot(step_N, top1_N, "-o", ms=4, color=SERIES[k % len(SERIES)], label=f"head {k}")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(bottom=0)
        _over_steps(axes, "held-out top-1", 5)

    return svg(
        "accuracy", "Held-out top-1 accuracy of every head over the training steps", 2.6, draw
    )


def drift(steps: Sequence[dict], held_out: Sequence[dict] = ()) -> str:
    """The backbone's drift in Medusa-2: its loss in training, and KL to the original on held-out
    text (dashed).

    Rows of `{"step", "backbone_loss"}` and of `{"step", "kl"}`.
    """

    def draw(axes: Axes) -> None:
        step_N, loss_N, _ = _curves(
            [row | {"loss": row.get("backbone_loss"), "head_losses": ()} for row in steps], 0
        )
        axes.plot(
            step_N, loss_N, color=SERIES[1], linewidth=1.3, label="backbone's loss in training"
        )
        known = [row for row in held_out if row.get("kl") is not None]
        if known:
            label = "held-out KL to the original"
            axes.plot(
                [row["step"] for row in known],
                [row["kl"] for row in known],
                "--o",
                ms=3,
                color=INK,
                label=label,
            )
        axes.set_ylim(bottom=0)
        _over_steps(axes, "nats per position", 2)

    return svg("drift", "How far the backbone moves over the training steps", 2.6, draw)


def _over_steps(axes: Axes, label: str, num_columns: int) -> None:
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    legend_above(axes, num_columns)


def _curves(rows: Sequence[dict], num_heads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps [N], losses [N] and head losses [N, K] of at most `_MAX_POINTS` points, each the mean
    of its neighbours.
    """
    rows = [row for row in rows if row.get("step") is not None]
    table = np.full((len(rows), 2 + num_heads), np.nan)
    for i, row in enumerate(rows):
        values = [row["step"], row.get("loss"), *(row.get("head_losses") or ())]
        table[i, : len(values)] = np.array(values, dtype=float)
    table = table[np.isfinite(table[:, 1:]).any(axis=1)]
    if len(table) > _MAX_POINTS:
        table = np.stack(
            [
                np.ma.masked_invalid(part).mean(0).filled(np.nan)
                for part in np.array_split(table, _MAX_POINTS)
            ]
        )
    return table[:, 0], table[:, 1], table[:, 2:]


def layout(choices: Sequence[Sequence[int]]) -> dict[Path, Place]:
    """Every node's place as (depth, line): a first child stays on its parent's line, further ones
    take new lines.

    The path of first guesses is thus the top line. The root and prefixes missing from `choices` are
    included.
    """
    places: dict[Path, Place] = {}
    line, parents = 0, set()
    for node in sorted({tuple(path[:depth]) for path in choices for depth in range(len(path) + 1)}):
        if node:  # lexicographic order: a parent comes right before its first child
            line += node[:-1] in parents
            parents.add(node[:-1])
        places[node] = (len(node), line)
    return places


def tree(choices: Sequence[Sequence[int]], node_shares: Sequence[float | None] = ()) -> str:
    """The tree from left to right, one column per head; a node's area and colour show the share of
    steps that add it.

    Above each column is the share of steps that add any of its nodes: 1 and their sum are the
    expected rate.
    """
    places = layout(choices)
    known = (
        {tuple(path): p or 0.0 for path, p in zip(choices, node_shares, strict=True)}
        if node_shares
        else {}
    )
    shares = {node: known.get(node, 0.0 if known and node else 1.0) for node in places}
    depth = max(map(len, places))
    columns = [
        sum(share for node, share in known.items() if len(node) == k + 1) for k in range(depth)
    ]
    names = [f"head {k}" + (f"\n{column:.0%}" if known else "") for k, column in enumerate(columns)]
    num_lines = 1 + max(line for _, line in places.values())
    height = 0.7 + min(0.15 * max(num_lines, 6), 12)  # inches; large trees have closer lines

    def draw(axes: Axes) -> None:
        for node, place in places.items():
            if node:
                _edge(axes, places[node[:-1]], place, shares[node])
        _nodes(axes, places, shares)
        axes.set_xlim(-0.15, depth + 0.4)
        axes.set_ylim(num_lines - 0.3, -1)
        axes.set_xticks(range(depth + 1), ["token", *names])
        axes.xaxis.tick_top()
        axes.tick_params(axis="both", length=0)
        axes.set_yticks([])
        axes.grid(False)
        axes.spines[:].set_visible(False)

    return svg("tree", f"Tree of {len(choices)} nodes and depth {depth}", height, draw)


def _edge(axes: Axes, start: Place, end: Place, share: float) -> None:
    (x0, y0), (x1, y1) = start, end
    curve = Curve(
        [(x0, y0), (x0 + 0.5, y0), (x0 + 0.4, y1), (x1, y1)], [Curve.MOVETO, *[Curve.CURVE4] * 3]
    )
    alpha = 0.2 + 0.5 * share**0.5
    axes.add_patch(
        PathPatch(curve, facecolor="none", edgecolor=ACCENT, alpha=alpha, linewidth=0.9 + 5 * share)
    )


def _nodes(axes: Axes, places: dict[Path, Place], shares: dict[Path, float]) -> None:
    x_N, y_N = np.array(list(places.values()), dtype=float).T
    share_N = np.array(list(shares.values()))
    area_N = 20 + 200 * share_N
    axes.scatter(
        x_N, y_N, area_N, color=CARD, zorder=3, linewidth=0
    )  # hides the edges behind a translucent node
    dots = axes.scatter(x_N, y_N, area_N, color=ACCENT, zorder=4, linewidth=0)
    dots.set_alpha(0.3 + 0.7 * np.sqrt(share_N))
    for node, x, y, share in zip(places, x_N, y_N, share_N, strict=True):
        if node and share >= 0.02:
            offset = (0.5 * np.sqrt(20 + 200 * share) + 2, 4)
            axes.annotate(
                f"{share:.0%}", (x, y), offset, textcoords="offset points", color=INK, size=8
            )
