"""The drawings: the place of what they draw, and that they take a real run's data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.report import plots
from pipeline.report.report import CurvePoint

paths = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def trees(draw) -> list[tuple[int, ...]]:
    """Paths closed under prefixes."""
    leaves = draw(st.lists(paths, min_size=1, max_size=40))
    return sorted({leaf[:depth] for leaf in leaves for depth in range(1, len(leaf) + 1)})


@given(trees())
def test_nodes_have_places_of_their_own_and_leaves_their_lines(choices):
    places = plots.tree_layout(choices)
    assert len(set(places.values())) == len(places) == len(choices) + 1
    assert places[()] == (0, 0)
    for node, (depth, line) in places.items():
        assert depth == len(node)
        assert not node or places[node[:-1]][1] <= line
    parents = {node[:-1] for node in choices}
    leaves = [node for node in choices if node not in parents]
    assert sorted(places[leaf][1] for leaf in leaves) == list(range(len(leaves)))


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
