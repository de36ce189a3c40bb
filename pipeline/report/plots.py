"""Plots as SVG elements inside report.html; all text in them is ours and ASCII.

Drawn by matplotlib through its object-oriented API. The same data gives the same bytes: no date, a
fixed salt for ids, the user's matplotlibrc ignored. Colours are CSS variables, so that one drawing
serves the light and the dark scheme; text stays text, in the page's font.

Letters: K heads, N points of a curve, R ranks.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.artifacts.check_result import BatchRow, LoadRow, TreeRow, TypicalRow
from pipeline.artifacts.tree_file import Accuracy, TimedSize
from pipeline.decoding.tree import TreePath
from pipeline.report.report import CurvePoint, Extras, Report
from pipeline.report.tables import top

Numbers = Sequence[float | None]
Place = tuple[int, int]
Drawn = tuple[Figure, str]  # with its label
Figures = dict[str, Drawn]  # by name

STEP, PER_STEP = "optimizer step", "tokens per step"

# Placeholder colours, replaced by CSS variables in `_svg`.
INK, MUTED, LINE, CARD, ACCENT = (f"#0000{i:02x}" for i in range(1, 6))
SERIES = tuple(f"#0001{i:02x}" for i in range(6))
VARIABLES = {INK: "ink", MUTED: "muted", LINE: "line", CARD: "card", ACCENT: "accent"}
VARIABLES.update({colour: f"s{i}" for i, colour in enumerate(SERIES)})
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
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
    "axes.unicode_minus": False,
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
    "lines.markersize": 4,
    "patch.linewidth": 0,
    "xtick.major.size": 0,
}
WIDTH = 5.0  # inches: text of 10 units is 9 pixels high on a phone and 14 on a desktop
MAX_POINTS = 120  # per curve: keeps curves readable and the page small


def drawings(report: Report, extras: Extras) -> dict[str, str]:
    """The plots for which there is data, by name, as `<svg>` elements."""
    found = {}
    with matplotlib.style.context(["default", SETTINGS]):
        figures = {**_run_figures(report, extras), **_check_figures(report)}
        for name, (figure, label) in figures.items():
            found[name] = _svg(figure, name.replace("_", "-"), label)
    return found


def _run_figures(report: Report, extras: Extras) -> Figures:
    """The plots of heads, tree and training."""
    found = {}
    calibration, losses, held_out = extras.calibration, extras.losses, extras.held_out
    if any(head.top1 is not None for head in report.heads):
        found["heads"] = head_accuracy(report.heads)
    if calibration and not calibration.dynamic:
        found["tree"] = tree(calibration.choices, calibration.node_shares)
    if report.tree and report.tree.sizes:
        found["sizes"] = tree_sizes(report.tree.sizes, report.tree.nodes)
    if losses:
        found["losses"] = head_losses(losses, held_out)
    if any(point.head_top1 for point in held_out):
        found["accuracy"] = held_out_accuracy(held_out)
    if any(point.backbone_loss is not None for point in losses):
        found["drift"] = drift(losses, held_out)
    return found


def _check_figures(report: Report) -> Figures:
    """The plots of decoding and of the studies."""
    found = {}
    if report.native and report.native.accepted_lengths:
        found["accepted"] = accepted_lengths(report.native.accepted_lengths)
    studies = report.studies
    if studies.typical:
        found["study_typical"] = typical(studies.typical, "rejection")
        found["study_typical_likelihood"] = typical(studies.typical, "plain")
    if studies.heads and len(studies.heads) > 1:
        found["study_heads"] = heads_used(studies.heads)
    if studies.batch:
        sizes = [row.batch_size for row in studies.batch]
        found["study_batch"] = speeds(sizes, studies.batch, "sequences at once")
    if studies.load:
        requests = [row.requests for row in studies.load]
        found["study_load"] = speeds(requests, studies.load, "requests at once")
    return found


def _new_figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure, name: str, label: str) -> str:
    """The figure as an `<svg>` element without style sheet; its ids begin with `name`."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    view_box = re.search(r'viewBox="[^"]*"', text)
    assert view_box
    opening = f'<svg role="img" aria-label="{label}" {view_box[0]}>'
    text = re.sub(r"<svg[^>]*>", opening, text, count=1)
    # A hundredth of a unit is less than a pixel.
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), text)
    text = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return text.strip()


# --- curves


@dataclass(frozen=True)
class Line:
    """A curve; unknown values are left out. `style` is matplotlib's."""

    x: Numbers
    y: Numbers
    label: str | None
    colour: str
    style: str = "-o"


def _lines(
    lines: Sequence[Line],
    labels: tuple[str, str],
    *,
    from_zero: bool = True,
    in_percent: bool = False,
) -> tuple[Figure, Axes]:
    """A figure of curves; `labels` are those of the two axes.

    A curve of more than `MAX_POINTS` points shows means of neighbouring ones.
    """
    figure, axes = _new_figure(2.8)
    for line in lines:
        points_N2 = np.array([line.x, line.y], dtype=float).T
        points_N2 = points_N2[np.isfinite(points_N2).all(axis=1)]
        if len(points_N2) > MAX_POINTS:
            parts = np.array_split(points_N2, MAX_POINTS)
            points_N2 = np.stack([part.mean(axis=0) for part in parts])
        axes.plot(*points_N2.T, line.style, color=line.colour, label=line.label)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    if from_zero:
        axes.set_ylim(bottom=0)
    if in_percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    num_names = sum(line.label is not None for line in lines)
    _legend_above(axes, num_names if num_names < 6 else 3)
    return figure, axes


def _legend_above(axes: Axes, num_columns: int) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=num_columns)


def _values(rows: Sequence[object], field: str) -> Numbers:
    """A field of every row."""
    return [getattr(row, field) for row in rows]


def head_losses(steps: Sequence[CurvePoint], held_out: Sequence[CurvePoint]) -> Drawn:
    """Cross-entropy of every head over the training steps, held-out losses dashed."""
    lines = []
    for k in range(len(steps[-1].head_losses)):
        for points, style, label in ((steps, "-", f"head {k}"), (held_out, "--o", None)):
            losses = [point.head_losses[k] for point in points]
            colour = SERIES[k % len(SERIES)]
            lines.append(Line(_values(points, "step"), losses, label, colour, style))
    if held_out:
        lines.append(Line([], [], "held-out", MUTED, "--o"))
    figure, _ = _lines(lines, (STEP, "cross-entropy (nats)"), from_zero=False)
    return figure, "Loss of every head over the training steps"


def held_out_accuracy(held_out: Sequence[CurvePoint]) -> Drawn:
    """Held-out top-1 accuracy of every head over the training steps."""
    lines = []
    for k in range(len(held_out[0].head_top1)):
        top1 = [point.head_top1[k] for point in held_out]
        x = _values(held_out, "step")
        lines.append(Line(x, top1, f"head {k}", SERIES[k % len(SERIES)]))
    figure, _ = _lines(lines, (STEP, "held-out top-1"), in_percent=True)
    return figure, "Held-out top-1 accuracy of every head over the training steps"


def drift(steps: Sequence[CurvePoint], held_out: Sequence[CurvePoint]) -> Drawn:
    """Medusa-2's loss of the backbone in training, and its KL to the original on held-out text."""
    losses, kls = _values(steps, "backbone_loss"), _values(held_out, "kl")
    x = _values(steps, "step")
    lines = [Line(x, losses, "backbone's loss in training", SERIES[1], "-")]
    if any(kl is not None for kl in kls):
        x = _values(held_out, "step")
        lines.append(Line(x, kls, "held-out KL to the original", INK, "--o"))
    figure, _ = _lines(lines, (STEP, "nats per position"))
    return figure, "How far the backbone moves over the training steps"


def tree_sizes(sizes: Sequence[TimedSize], chosen: int) -> Drawn:
    """Overhead, expected rate and speedup by number of nodes; a line at the chosen size."""
    figure, axes = _costs(sizes, "nodes", "expected_")
    nodes = [size.nodes for size in sizes]
    _powers_of_two(axes, nodes)
    axes.axvline(chosen, color=INK, linewidth=1, linestyle=":")
    side = "right" if chosen > max(nodes) / 4 else "left"
    above = axes.get_xaxis_transform()
    axes.text(chosen, 1, f" {chosen} used ", transform=above, ha=side, va="top", color=INK)
    return figure, "Overhead, expected acceleration rate and speedup by tree size"


def heads_used(rows: Sequence[TreeRow]) -> Drawn:
    """Acceleration rate, overhead and speedup by how many heads are used."""
    figure, axes = _costs(rows, "heads", "")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, "Acceleration rate, overhead and speedup by heads used"


def _costs(rows: Sequence[object], x: str, prefix: str) -> tuple[Figure, Axes]:
    """Rate, overhead and speedup over the field `x`; rate and speedup have the `prefix`."""
    places = _values(rows, x)
    lines = [
        Line(places, _values(rows, f"{prefix}acceleration_rate"), PER_STEP, SERIES[1]),
        Line(places, _values(rows, "overhead"), "overhead", SERIES[2]),
        Line(places, _values(rows, f"{prefix}speedup"), "speedup", ACCENT),
    ]
    figure, axes = _lines(lines, (x, ""))
    axes.axhline(1, color=MUTED, linewidth=1, linestyle="--")
    return figure, axes


def speeds(x: Sequence[int], rows: Sequence[BatchRow | LoadRow], label: str) -> Drawn:
    """Tokens per second, plain and with heads, and the speedup, by what decodes at once."""
    plain, with_heads = (
        _values(rows, "baseline_tokens_per_second"),
        _values(rows, "tokens_per_second"),
    )
    lines = [Line(x, plain, "plain", MUTED), Line(x, with_heads, "with heads", ACCENT)]
    figure, axes = _lines(lines, (label, "tokens/s"))
    _powers_of_two(axes, x)
    axes.margins(y=0.15)
    for place, row in zip(x, rows, strict=True):
        height = max(row.baseline_tokens_per_second or 0, row.tokens_per_second or 0)
        if row.speedup:
            axes.text(place, height, f"{row.speedup:.2f}x\n", ha="center", color=INK, size=9)
    return figure, f"Tokens per second by {label}"


def _powers_of_two(axes: Axes, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()


def typical(rows: Sequence[TypicalRow], exact: str) -> Drawn:
    """Typical acceptance over eps, one colour per temperature, beside exact sampling (dashed).

    Against `rejection` sampling it is the acceleration rate, against `plain` sampling the
    log-likelihood. Temperature 0 is greedy decoding.
    """
    label, field = PER_STEP, "acceleration_rate"
    if exact == "plain":
        label = field = "log_likelihood"
    lines, levels = [], []
    temperatures = sorted({row.temperature for row in rows})
    for number, temperature in enumerate(temperatures):
        here = [row for row in rows if row.temperature == temperature]
        swept = [row for row in here if row.rule == "typical"]
        name = f"T = {temperature:g}" if temperature else "greedy"
        colour = SERIES[number % len(SERIES)]
        lines.append(Line(_values(swept, "eps"), _values(swept, field), name, colour))
        for row in here:
            if row.rule in (exact, "greedy"):
                levels.append((getattr(row, field), colour))
    lines.append(Line([], [], f"{exact} sampling", MUTED, "--"))
    label = label.replace("_", "-")
    figure, axes = _lines(lines, ("eps, delta = sqrt(eps)", label), from_zero=False)
    for level, colour in levels:
        if level is not None:
            axes.axhline(level, color=colour, linewidth=1.2, linestyle="--")
    return figure, f"Typical acceptance: {label} by eps"


# --- bars


def head_accuracy(heads: Sequence[Accuracy]) -> Drawn:
    """For each head, the share of held-out tokens among its first k guesses, one band per k."""
    figure, axes = _new_figure(3.4)
    x_K = np.arange(len(heads))
    below_K = np.zeros(len(heads))
    for rank in range(1, 6):
        top_K = np.array([top(head, rank) for head in heads], dtype=float)
        if np.isnan(top_K).all():
            continue
        band_K = np.fmax(top_K - below_K, 0)  # an unknown top-k adds nothing
        alpha = 1.0 if rank == 1 else 0.55 * 0.72 ** (rank - 2)
        axes.bar(x_K, band_K, 0.62, below_K, color=ACCENT, alpha=alpha, label=f"top-{rank}")
        below_K += band_K
    for k, head in enumerate(heads):
        if head.top1 is not None and head.top1 > 0.08:
            place = (k, head.top1 / 2)
            axes.text(*place, f"{head.top1:.0%}", ha="center", va="center", color=CARD)
        last = float(below_K[k])
        axes.text(k, last + 0.015, f"{last:.0%}", ha="center", color=INK)
    axes.set_xticks(x_K, [f"head {k}\nt+{k + 2}" for k in x_K])
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _legend_above(axes, 5)
    return figure, "Accuracy of every head, top-1 to top-5"


def accepted_lengths(num_steps: Sequence[int]) -> Drawn:
    """The share of decoding steps by accepted length; entry i counts steps with i guesses kept."""
    figure, axes = _new_figure(3.0)
    total = max(sum(num_steps), 1)
    shares = [number / total for number in num_steps]
    bars = axes.bar(range(len(shares)), shares, 0.68, color=ACCENT)
    axes.bar_label(bars, [f"{share:.0%}" for share in shares], padding=2, color=INK)
    axes.set_xticks(range(len(shares)))
    axes.margins(y=0.15)
    axes.set_xlabel("guessed tokens kept in a step")
    axes.set_ylabel("share of steps")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return figure, "Share of decoding steps by accepted length"


# --- the tree (paper, section 2.3.3)


def layout(choices: Sequence[TreePath]) -> dict[TreePath, Place]:
    """Every node's place as (depth, line), the root included.

    A first child stays on its parent's line, further ones take new lines: the path of first guesses
    is the top line.
    """
    places: dict[TreePath, Place] = {(): (0, 0)}
    line, parents = 0, set()
    for node in sorted(choices):  # a parent comes right before its first child
        line += node[:-1] in parents
        parents.add(node[:-1])
        places[node] = (len(node), line)
    return places


def tree(choices: Sequence[TreePath], node_shares: Sequence[float]) -> Drawn:
    """The tree from left to right, one column per head.

    A node's area and colour show the share of steps that add it. Above each column is the share of
    steps that add any of its nodes: 1 and their sum are the expected rate.
    """
    places = layout(choices)
    shares = {(): 1.0, **dict(zip(choices, node_shares, strict=True))}
    depth = max(map(len, choices))
    names = ["token"]
    for k in range(depth):
        column = sum(share for node, share in shares.items() if len(node) == k + 1)
        names.append(f"head {k}\n{column:.0%}")
    num_lines = 1 + max(line for _, line in places.values())
    # Large trees have closer lines.
    figure, axes = _new_figure(0.7 + min(0.15 * max(num_lines, 6), 12))
    for node, (depth_reached, line) in places.items():
        if node:
            start = places[node[:-1]]
            x, y = (start[0], depth_reached), (start[1], line)
            style = {"alpha": 0.2 + 0.5 * shares[node] ** 0.5, "linewidth": 1 + 5 * shares[node]}
            axes.plot(x, y, color=ACCENT, zorder=1, **style)
    x_N, y_N = np.array(list(places.values()), dtype=float).T
    share_N = np.array([shares[node] for node in places])
    area_N = 20 + 200 * share_N
    axes.scatter(x_N, y_N, area_N, color=CARD, zorder=3, linewidth=0)  # hides edges behind nodes
    alpha_N = 0.3 + 0.7 * np.sqrt(share_N)
    axes.scatter(x_N, y_N, area_N, color=ACCENT, zorder=4, linewidth=0, alpha=alpha_N)
    for node, place in places.items():
        share = shares[node]
        if node and share >= 0.02:
            offset = (0.5 * np.sqrt(20 + 200 * share) + 2, 4)
            text = f"{share:.0%}"
            axes.annotate(text, place, offset, textcoords="offset points", color=INK, size=8)
    axes.set_xlim(-0.15, depth + 0.4)
    axes.set_ylim(num_lines - 0.3, -1)
    axes.set_xticks(range(depth + 1), names)
    axes.xaxis.tick_top()
    axes.tick_params(axis="both", length=0)
    axes.set_yticks([])
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return figure, f"Tree of {len(choices)} nodes and depth {depth}"
