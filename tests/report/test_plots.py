"""The drawings: the place of what they draw, and that they take a real run's data."""

from __future__ import annotations

import re

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.check_result import LoadRow, TypicalRow
from pipeline.artifacts.json_form import from_json
from pipeline.artifacts.tree_file import Accuracy, TimedSize
from pipeline.report import plots
from pipeline.report.report import CurvePoint, Extras, Report
from tests.report.conftest import typed

paths = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def trees(draw) -> list[tuple[int, ...]]:
    """Paths closed under prefixes."""
    leaves = draw(st.lists(paths, min_size=1, max_size=40))
    return sorted({leaf[:depth] for leaf in leaves for depth in range(1, len(leaf) + 1)})


@given(trees())
def test_nodes_have_places_of_their_own_and_leaves_their_lines(choices):
    places = plots.layout(choices)
    assert len(set(places.values())) == len(places) == len(choices) + 1
    assert places[()] == (0, 0)
    for node, (depth, line) in places.items():
        assert depth == len(node)
        assert not node or places[node[:-1]][1] <= line
    parents = {node[:-1] for node in choices}
    leaves = [node for node in choices if node not in parents]
    assert sorted(places[leaf][1] for leaf in leaves) == list(range(len(leaves)))


def test_a_path_of_first_guesses_runs_straight():
    places = plots.layout([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    assert [places[(0,) * depth] for depth in range(4)] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert places[(1,)][1] == places[(1, 0)][1] == 2


def texts_in(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def curves_in(figure) -> dict[str, list[list[float]]]:
    return {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}


def test_the_tree_shows_likely_nodes_and_sums_its_columns():
    figure, _ = plots.tree([(0,), (1,), (0, 0)], [0.62, 0.01, 0.25])
    assert texts_in(figure) == ["62%", "25%"]
    names = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert names == ["token", "head 0\n63%", "head 1\n25%"]


def test_head_accuracy_shows_first_and_last_guess_of_every_head():
    heads = [Accuracy(labels=9, top1=0.62, top5=0.84), Accuracy(labels=9, top5=0.66)]
    figure, _ = plots.head_accuracy(heads)
    assert texts_in(figure) == ["62%", "84%", "66%"]


def test_accepted_lengths_are_shares_of_all_steps():
    figure, _ = plots.accepted_lengths([10, 25, 15])
    assert texts_in(figure) == ["20%", "50%", "30%"]
    assert texts_in(plots.accepted_lengths([0, 0])[0]) == ["0%", "0%"]


def test_long_curves_are_averaged_and_not_sampled():
    steps = [CurvePoint(step=step, head_losses=[float(step % 2)]) for step in range(10_000)]
    figure, _ = plots.head_losses(steps, [])
    points = curves_in(figure)["head 0"]
    assert len(points) <= 300
    assert [loss for _, loss in points] == pytest.approx([0.5] * len(points), abs=0.05)


def test_held_out_losses_are_named_only_where_there_are_some():
    steps = [CurvePoint(step=0, head_losses=[1.0, None])]
    assert "held-out" in curves_in(plots.head_losses(steps, steps)[0])
    assert "held-out" not in curves_in(plots.head_losses(steps, [])[0])


def test_the_chosen_size_and_every_measured_one_are_named():
    sizes = [TimedSize(nodes=n, overhead=1.1, expected_acceleration_rate=2.0) for n in (1, 4, 64)]
    figure, _ = plots.tree_sizes(sizes, 9)
    assert texts_in(figure) == [" 9 used "]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["1", "4", "64"]
    assert curves_in(figure)["overhead"] == [[1, 1.1], [4, 1.1], [64, 1.1]]


def test_typical_acceptance_has_a_curve_per_temperature_beside_sampling():
    rules = (("plain", None), ("rejection", None), ("typical", 0.01), ("typical", 0.09))
    values = {"acceleration_rate": 2.0, "log_likelihood": -1.0}
    rows = []
    for temperature in (0.3, 1.0):
        for rule, eps in rules:
            rows.append(TypicalRow(temperature=temperature, rule=rule, eps=eps, **values))
    rates = curves_in(plots.typical(rows, "rejection")[0])
    assert {"T = 0.3", "T = 1", "rejection sampling"} <= rates.keys()
    assert rates["T = 1"] == [[0.01, 2.0], [0.09, 2.0]]
    assert curves_in(plots.typical(rows, "plain")[0])["T = 1"] == [[0.01, -1.0], [0.09, -1.0]]


def test_speeds_are_drawn_plain_and_with_heads():
    speed = {"baseline_tokens_per_second": 10.0, "tokens_per_second": 15.0, "speedup": 1.5}
    figure, _ = plots.speeds([1, 2], [LoadRow(requests=1, **speed), LoadRow(requests=2)], "x")
    assert curves_in(figure) == {"plain": [[1, 10]], "with heads": [[1, 15]]}
    assert texts_in(figure) == ["1.50x\n"]


def test_the_backbone_s_drift_is_drawn_where_it_was_measured():
    steps = [CurvePoint(step=step, backbone_loss=0.02) for step in range(5)]
    held_out = [CurvePoint(step=4, kl=0.01), CurvePoint(step=0)]
    curves = curves_in(plots.drift(steps, held_out)[0])
    assert curves["held-out KL to the original"] == [[4, 0.01]]
    assert len(curves_in(plots.drift(steps, held_out[1:])[0])) == 1


def test_drawings_are_of_what_there_is(report, extras):
    assert plots.drawings(Report(), Extras()) == {}
    del extras["losses"], report["heads"]
    del report["check"]["native"]["studies"], extras["held_out"]
    assert set(plots.drawings(typed(report), from_json(Extras, extras))) == {"tree", "accepted"}


def test_drawings_ignore_settings_and_have_no_style(report):
    plain = plots.drawings(typed(report), Extras())
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert plots.drawings(typed(report), Extras()) == plain
        assert matplotlib.rcParams["font.size"] == 30
    drawn = "".join(plain.values())
    assert not re.search(r"(fill|stroke): #|font-family|<metadata|<style|DOCTYPE|xmlns", drawn)
    assert drawn.isascii()
