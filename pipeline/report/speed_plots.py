"""Plots of speed: accepted lengths, tree sizes on the device, the studies; all text in them is ours
and ASCII.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter, ScalarFormatter

from pipeline.report.svg import ACCENT, INK, MUTED, SERIES, legend_above, svg

_FIGURES = (
    ("acceleration_rate", "tokens per step", SERIES[1]),
    ("overhead", "overhead", SERIES[2]),
    ("speedup", "speedup", ACCENT),
)


def accepted_lengths(num_steps: Sequence[float]) -> str:
    """The share of decoding steps by accepted length; entry i counts the steps that accepted i
    guessed tokens.
    """
    share = np.nan_to_num(np.array(num_steps, dtype=float))
    share = share / max(share.sum(), 1)

    def draw(axes: Axes) -> None:
        x = np.arange(len(share))
        axes.bar(x, share, 0.68, color=ACCENT, linewidth=0)
        for i, value in enumerate(share):
            axes.text(
                i, value + share.max() * 0.02, f"{value:.0%}", ha="center", va="bottom", color=INK
            )
        axes.set_xticks(x)
        axes.tick_params(axis="x", length=0)
        axes.set_xlabel("guessed tokens kept in a step")
        axes.set_ylabel("share of steps")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(0, share.max() * 1.15 or 1)

    return svg("accepted", "Share of decoding steps by accepted length", 3.0, draw)


def tree_sizes(sizes: Sequence[dict], chosen: int | None) -> str:
    """Overhead, expected acceleration rate and their ratio, the speedup, by nodes; a line at the
    chosen size.
    """
    keys = {"acceleration_rate": "expected_acceleration_rate", "speedup": "expected_speedup"}
    rows = [{key: size.get(keys.get(key, key)) for key, *_ in _FIGURES} for size in sizes]

    def draw(axes: Axes) -> None:
        _figures(axes, [size.get("nodes") for size in sizes], rows)
        axes.set_xlabel("nodes")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(
            FixedLocator([size["nodes"] for size in sizes if size.get("nodes")])
        )
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
        if chosen:
            axes.axvline(chosen, color=INK, linewidth=1, linestyle=":")
            is_right = chosen > max(size.get("nodes") or 0 for size in sizes) / 4
            axes.annotate(
                f"{chosen} used", (chosen, 1), (-5 if is_right else 5, 0), xycoords=axes.get_xaxis_transform(),  # noqa: E501
                textcoords="offset points", ha="right" if is_right else "left", va="top", color=INK, size=9,  # noqa: E501
            )  # fmt: skip

    return svg("sizes", "Overhead, expected acceleration rate and speedup by tree size", 3.0, draw)


def heads_used(rows: Sequence[dict]) -> str:
    """Acceleration rate, overhead and speedup by how many heads are used."""

    def draw(axes: Axes) -> None:
        _figures(axes, [row.get("heads") for row in rows], rows)
        axes.set_xlabel("heads used")
        axes.xaxis.set_major_locator(
            FixedLocator([row["heads"] for row in rows if row.get("heads")])
        )

    return svg("study-heads", "Acceleration rate, overhead and speedup by heads used", 2.8, draw)


def batch_sizes(rows: Sequence[dict]) -> str:
    """Tokens per second, plain and with heads, by how many sequences decode at once; the speedup
    above each pair.
    """
    plain_N, heads_N = (
        _numbers(rows, key) for key in ("baseline_tokens_per_second", "tokens_per_second")
    )

    def draw(axes: Axes) -> None:
        x_N = np.arange(len(rows))
        axes.bar(x_N - 0.19, plain_N, 0.36, color=MUTED, alpha=0.55, linewidth=0, label="plain")
        axes.bar(x_N + 0.19, heads_N, 0.36, color=ACCENT, linewidth=0, label="with heads")
        for x, height, row in zip(x_N, np.fmax(plain_N, heads_N), rows, strict=True):
            if np.isfinite(height) and row.get("speedup") is not None:
                axes.text(
                    float(x),
                    height,
                    f"{row['speedup']:.2f}x",
                    ha="center",
                    va="bottom",
                    color=INK,
                    size=9,
                )
        axes.set_xticks(x_N, [f"{row.get('batch_size')}" for row in rows])
        axes.tick_params(axis="x", length=0)
        axes.margins(y=0.1)
        axes.set_xlabel("sequences at once")
        axes.set_ylabel("tokens/s")
        legend_above(axes, 2)

    return svg("study-batch", "Tokens per second by batch size", 2.8, draw)


def load(rows: Sequence[dict]) -> str:
    """Tokens per second of the server, plain and with heads, by requests at once, and the speedup
    at each.
    """
    plain_N, heads_N, x_N = (
        _numbers(rows, key)
        for key in ("baseline_tokens_per_second", "tokens_per_second", "requests")
    )

    def draw(axes: Axes) -> None:
        axes.plot(x_N, plain_N, "-o", ms=4, color=MUTED, label="plain")
        axes.plot(x_N, heads_N, "-o", ms=4, color=ACCENT, label="with heads")
        for x, height, row in zip(x_N, np.fmax(plain_N, heads_N), rows, strict=True):
            if np.isfinite(height) and row.get("speedup") is not None:
                axes.annotate(
                    f"{row['speedup']:.2f}x", (float(x), float(height)), (0, 5), textcoords="offset points",  # noqa: E501
                    ha="center", va="bottom", color=INK, size=9,
                )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator([x for x in x_N if np.isfinite(x)]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.margins(y=0.15)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests at once")
        axes.set_ylabel("tokens/s")
        legend_above(axes, 2)

    return svg("study-load", "Tokens per second of the server by requests at once", 3.0, draw)


def typical(rows: Sequence[dict], key: str, label: str) -> str:
    """A figure of typical acceptance over eps, one colour per temperature; dashed: sampling from
    the target.

    The dashed line is rejection sampling's acceleration rate, or plain sampling's log-likelihood.
    """
    exact = "plain" if key == "log_likelihood" else "rejection"
    temperatures = sorted(
        {row["temperature"] for row in rows if row.get("temperature") is not None}
    )

    def draw(axes: Axes) -> None:
        for temperature in temperatures:
            here = [row for row in rows if row.get("temperature") == temperature]
            swept = [row for row in here if row.get("rule") == "typical"]
            others = [
                row
                for row in here
                if row.get("rule") in (exact, "greedy") and row.get(key) is not None
            ]
            colour = SERIES[temperatures.index(temperature) % len(SERIES)]
            name = f"T = {temperature:g}" if temperature else "greedy"
            if swept:
                axes.plot(
                    _numbers(swept, "eps"),
                    _numbers(swept, key),
                    "-o",
                    ms=4,
                    color=colour,
                    label=name,
                )
            for row in others[-1:]:
                axes.axhline(
                    row[key],
                    color=colour,
                    linewidth=1.2,
                    linestyle="--",
                    label=None if swept else name,
                )
        axes.plot([], [], "--", color=MUTED, linewidth=1.2, label=f"{exact} sampling")
        axes.set_xlabel("eps, delta = sqrt(eps)")
        axes.set_ylabel(label)
        legend_above(axes, 3)

    return svg(
        f"study-typical-{key.replace('_', '-')}", f"Typical acceptance: {label} by eps", 3.0, draw
    )


def _figures(axes: Axes, x: Sequence[float | None], rows: Sequence[dict]) -> None:
    x_N = np.array(x, dtype=float)
    for key, label, colour in _FIGURES:
        axes.plot(x_N, _numbers(rows, key), "-o", ms=4, color=colour, label=label)
    axes.axhline(1, color=MUTED, linewidth=1, linestyle="--")
    axes.set_ylim(bottom=0)
    legend_above(axes, 3)


def _numbers(rows: Sequence[dict], key: str) -> np.ndarray:
    """The rows' values [N]; unknown ones are nan and are not drawn."""
    return np.array([row.get(key) for row in rows], dtype=float)
