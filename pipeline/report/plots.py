"""The plots of report.html: head accuracies, losses, accepted lengths; all text in them is ours and ASCII."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.report.drawing import ACCENT, CARD, INK, MUTED, SERIES, svg

_MAX_POINTS = 120  # per curve: so that single steps do not blur it, nor make the page heavy


def head_accuracy(heads: Sequence[dict]) -> str:
    """Per head, the share of held-out positions whose token is among its first k guesses: one bar, one band per k."""
    ranks = [rank for rank in range(1, 6) if any(head.get(f"top{rank}") is not None for head in heads)]
    top_RK = np.array([[head.get(f"top{rank}") for head in heads] for rank in ranks], dtype=float)  # R ranks, K heads

    def draw(axes: Axes) -> None:
        x = np.arange(len(heads))
        below = np.zeros(len(heads))
        for rank, top_K in zip(ranks, top_RK, strict=True):
            top_K = np.fmax(top_K, below)  # top-k never falls as k grows; an unknown one adds nothing
            alpha = 1.0 if rank == ranks[0] else 0.55 * 0.72 ** (rank - 2)
            axes.bar(x, top_K - below, 0.62, bottom=below, color=ACCENT, alpha=alpha, label=f"top-{rank}", linewidth=0)
            below = top_K
        for i, (first, last) in enumerate(zip(top_RK[0], below, strict=True)):
            if np.isfinite(first) and first > 0.08:
                axes.text(i, first / 2, f"{first:.0%}", ha="center", va="center", color=CARD, weight="bold")
            axes.text(i, last + 0.015, f"{last:.0%}", ha="center", va="bottom", color=INK)
        axes.set_xticks(x, [f"head {i}\nt+{i + 2}" for i in x])
        axes.tick_params(axis="x", length=0)
        axes.set_ylim(0, 1.08)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(ranks), handlelength=1, columnspacing=1.2)

    return svg("heads", "Accuracy of every head, top-1 to top-5", 3.4, draw)


def losses(steps: Sequence[dict], held_out: Sequence[dict] = ()) -> str:
    """Cross-entropy of every head over the training steps, held-out losses dashed.

    Each row is `{"step", "loss", "head_losses"}`; long runs are averaged down to a few hundred points.
    """
    num_heads = max((len(row.get("head_losses") or ()) for row in [*steps, *held_out]), default=0)

    def draw(axes: Axes) -> None:
        for rows, style, width in ((steps, "-", 1.3), (held_out, "--", 1.6)):
            if not rows:
                continue
            step_N, loss_N, head_losses_NK = _curves(rows, num_heads)
            for k in range(num_heads):
                label = f"head {k}" if style == "-" else None
                colour = SERIES[k % len(SERIES)]
                marker = "o" if style == "--" else None
                axes.plot(
                    step_N, head_losses_NK[:, k], style, color=colour, linewidth=width, label=label, marker=marker, ms=3
                )
            if not num_heads:
                axes.plot(step_N, loss_N, style, color=ACCENT, label="loss" if style == "-" else "held-out loss")
        num_names = num_heads + bool(held_out)
        if num_heads and held_out:
            axes.plot([], [], "--o", color=MUTED, ms=3, label="held-out")
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("cross-entropy (nats)")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.legend(
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=num_names if num_names < 6 else 3,
            handlelength=1.2,
            columnspacing=1.0,
        )

    return svg("losses", "Loss of every head over the training steps", 3.0, draw)


def held_out_accuracy(held_out: Sequence[dict]) -> str:
    """Held-out top-1 accuracy of every head over the training steps; rows of `{"step", "head_top1"}`."""

    def draw(axes: Axes) -> None:
        step_N = np.array([row["step"] for row in held_out], dtype=float)
        top1_NK = np.array([row["head_top1"] for row in held_out], dtype=float)
        for k, top1_N in enumerate(top1_NK.T):
            axes.plot(step_N, top1_N, "-o", ms=4, color=SERIES[k % len(SERIES)], label=f"head {k}")
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("held-out top-1")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, handlelength=1.2, columnspacing=1.2)

    return svg("accuracy", "Held-out top-1 accuracy of every head over the training steps", 2.6, draw)


def drift(steps: Sequence[dict], held_out: Sequence[dict] = ()) -> str:
    """How far Medusa-2 moves the backbone: its own loss in training, and KL to the original on held-out text, dashed.

    Rows of `{"step", "backbone_loss"}` and of `{"step", "kl"}`.
    """

    def draw(axes: Axes) -> None:
        step_N, loss_N, _ = _curves([row | {"loss": row.get("backbone_loss"), "head_losses": ()} for row in steps], 0)
        axes.plot(step_N, loss_N, color=SERIES[1], linewidth=1.3, label="backbone's loss in training")
        known = [row for row in held_out if row.get("kl") is not None]
        if known:
            label = "held-out KL to the original"
            axes.plot([row["step"] for row in known], [row["kl"] for row in known], "--o", ms=3, color=INK, label=label)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("nats per position")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, handlelength=1.6, columnspacing=1.2)

    return svg("drift", "How far the backbone moves over the training steps", 2.6, draw)


def accepted_lengths(num_steps: Sequence[float]) -> str:
    """The share of decoding steps by accepted length; entry i counts the steps that accepted i guessed tokens."""
    share = np.nan_to_num(np.array(num_steps, dtype=float))
    share = share / max(share.sum(), 1)

    def draw(axes: Axes) -> None:
        x = np.arange(len(share))
        axes.bar(x, share, 0.68, color=ACCENT, linewidth=0)
        for i, value in enumerate(share):
            axes.text(i, value + share.max() * 0.02, f"{value:.0%}", ha="center", va="bottom", color=INK)
        axes.set_xticks(x)
        axes.tick_params(axis="x", length=0)
        axes.set_xlabel("guessed tokens kept in a step")
        axes.set_ylabel("share of steps")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(0, share.max() * 1.15 or 1)

    return svg("accepted", "Share of decoding steps by accepted length", 3.0, draw)


def _curves(rows: Sequence[dict], num_heads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps [N], losses [N] and head losses [N, K] of at most `_MAX_POINTS` points, each the mean of its neighbours."""
    rows = [row for row in rows if row.get("step") is not None]
    table = np.full((len(rows), 2 + num_heads), np.nan)
    for i, row in enumerate(rows):
        values = [row["step"], row.get("loss"), *(row.get("head_losses") or ())]
        table[i, : len(values)] = np.array(values, dtype=float)
    table = table[np.isfinite(table[:, 1:]).any(axis=1)]
    if len(table) > _MAX_POINTS:
        table = np.stack(
            [np.ma.masked_invalid(part).mean(0).filled(np.nan) for part in np.array_split(table, _MAX_POINTS)]
        )
    return table[:, 0], table[:, 1], table[:, 2:]
