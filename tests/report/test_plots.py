"""The drawings: the place of what they draw, and that they take a real run's data."""

from __future__ import annotations

import pytest

from pipeline.report import plots
from pipeline.report.report import CurvePoint


def texts_in(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def curves_in(axes) -> dict[str, list[list[float]]]:
    return {line.get_label(): line.get_xydata().tolist() for line in axes.lines}


def test_the_tree_shows_likely_nodes_and_sums_its_columns():
    axes = plots.plot_tree([(0,), (1,), (0, 0)], [0.62, 0.01, 0.25])
    assert texts_in(axes) == ["62%", "25%"]
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == ["token", "head 0\n63%", "head 1\n25%"]


def test_long_curves_are_averaged_and_not_sampled():
    steps = [CurvePoint(step=step, head_losses=[float(step % 2)]) for step in range(10_000)]
    points = curves_in(plots.plot_head_losses(steps, []))["head 0"]
    assert len(points) <= 300
    assert [loss for _, loss in points] == pytest.approx([0.5] * len(points), abs=0.05)
