"""The drawings: what they place where, and that they take what a real run hands them."""

from __future__ import annotations

import re

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.report import plots, speed_plots

choices_lists = st.lists(
    st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple), min_size=1, max_size=40
)


@given(choices_lists)
def test_no_two_nodes_share_a_place_and_no_edge_runs_upwards(choices):
    places = plots.layout(choices)
    assert len(set(places.values())) == len(places)
    assert places[()] == (0, 0)
    for node, (depth, line) in places.items():
        assert depth == len(node)
        assert not node or places[node[:-1]][1] <= line


@given(choices_lists)
def test_every_leaf_has_a_line_of_its_own(choices):
    places = plots.layout(choices)
    leaves = [
        node
        for node in places
        if not any(other[: len(node)] == node and other != node for other in places)
    ]
    assert sorted(places[leaf][1] for leaf in leaves) == list(range(len(leaves)))


def test_a_path_of_first_guesses_runs_straight():
    places = plots.layout([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    assert [places[(0,) * depth] for depth in range(4)] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert places[(1,)][1] == places[(1, 0)][1] == 2


def test_tree_shows_the_probabilities_of_its_likely_nodes():
    drawn = plots.tree([[0], [1], [0, 0]], [0.62, 0.01, 0.25])
    assert ">62%<" in drawn and ">25%<" in drawn and ">1%<" not in drawn
    assert "head 1" in drawn and "head 2" not in drawn


def test_tree_without_probabilities_is_drawn():
    assert "head 0" in plots.tree([[0], [1]])


def test_head_accuracy_shows_first_and_last_guess_of_every_head():
    drawn = plots.head_accuracy([{"top1": 0.62, "top5": 0.84}, {"top1": None, "top5": 0.66}])
    assert all(f">{text}<" in drawn for text in ("62%", "84%", "66%", "top-1", "top-5"))


def test_accepted_lengths_are_shares_of_all_steps():
    drawn = speed_plots.accepted_lengths([10, 25, 15])
    assert all(f">{text}<" in drawn for text in ("20%", "50%", "30%"))


def test_accepted_lengths_of_no_steps_at_all_are_drawn():
    assert "<svg" in speed_plots.accepted_lengths([0, 0])


def test_a_long_run_of_losses_stays_a_small_drawing():
    rows = [
        {"step": step, "loss": 3.0, "head_losses": [2.0 + step % 7, None]} for step in range(50_000)
    ]
    assert len(plots.losses(rows)) < 40_000


def test_curves_are_averaged_and_not_sampled():
    rows = [{"step": step, "loss": float(step % 2)} for step in range(10_000)]
    steps, losses, _ = plots._curves(rows, 0)
    assert len(steps) <= 300
    assert losses == pytest.approx(0.5, abs=0.05)


def test_losses_without_heads_or_with_rows_that_say_nothing_are_drawn():
    assert "loss" in plots.losses(
        [{"step": 0, "loss": None}, {"step": 1, "loss": 2.0}, {"loss": 1.0}], [{"step": 1}]
    )


def test_held_out_losses_are_named_only_where_there_are_some():
    rows = [{"step": 0, "loss": 2.0, "head_losses": [1.0, 1.0]}]
    assert "held-out" in plots.losses(rows, rows) and "held-out" not in plots.losses(rows)
    assert "held-out" not in plots.losses([{"step": 0, "loss": 2.0}])


def test_the_chosen_size_and_every_measured_one_are_named_on_the_plot_of_sizes():
    sizes = [
        {"nodes": nodes, "overhead": 1.1, "expected_acceleration_rate": 2.0} for nodes in (1, 4, 64)
    ]
    drawn = speed_plots.tree_sizes(sizes, 9)
    assert all(f">{text}<" in drawn for text in ("1", "4", "64", "9 used", "overhead"))


def test_typical_acceptance_has_a_curve_per_temperature_beside_sampling_itself():
    rows = [
        {
            "temperature": t,
            "rule": rule,
            "eps": eps,
            "acceleration_rate": 2.0,
            "log_likelihood": -1.0,
        }
        for t in (0.3, 1.0)
        for rule, eps in (
            ("plain", None),
            ("rejection", None),
            ("typical", 0.01),
            ("typical", 0.09),
        )
    ]
    drawn = speed_plots.typical(rows, "acceleration_rate", "tokens per step")
    assert all(text in drawn for text in ("T = 0.3", "T = 1", "rejection sampling"))
    assert "plain sampling" in speed_plots.typical(rows, "log_likelihood", "log-likelihood")


@pytest.fixture
def axes(monkeypatch) -> Axes:
    """Where the next plot is drawn."""
    drawn = Figure().add_subplot()
    for module in (plots, speed_plots):
        monkeypatch.setattr(module, "svg", lambda name, label, height, draw: draw(drawn))
    return drawn


def test_load_is_drawn_by_requests_plain_and_with_heads(axes):
    speeds = ((1, 10.0, 15.0), (2, 20.0, 30.0), (4, 30.0, 20.0))
    keys = ("requests", "baseline_tokens_per_second", "tokens_per_second")
    speed_plots.load([dict(zip(keys, row, strict=True)) for row in speeds])
    curves = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert curves == {
        "plain": [[1, 10], [2, 20], [4, 30]],
        "with heads": [[1, 15], [2, 30], [4, 20]],
    }


def test_batch_sizes_are_drawn_plain_and_with_heads(axes):
    row = {"batch_size": 2, "baseline_tokens_per_second": 10.0, "tokens_per_second": 15.0}
    speed_plots.batch_sizes([row])
    heights = {each.get_label(): [bar.get_height() for bar in each] for each in axes.containers}
    assert heights == {"plain": [10], "with heads": [15]}


def test_the_tree_s_columns_add_up_the_nodes_of_each_head(axes):
    plots.tree([[0], [1], [0, 0]], [0.5, 0.2, 0.25])
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == ["token", "head 0\n70%", "head 1\n25%"]


@pytest.mark.parametrize(
    "draw",
    [
        lambda rows: speed_plots.tree_sizes(rows, None),
        speed_plots.heads_used,
        speed_plots.batch_sizes,
        lambda rows: speed_plots.typical(rows, "log_likelihood", "log-likelihood"),
    ],
)
def test_rows_of_a_study_that_say_nothing_are_drawn(draw):
    assert "<svg" in draw([{"nodes": None, "heads": None}, {}])


def test_the_backbone_s_drift_is_drawn_where_medusa_2_measured_it():
    steps = [
        {"step": step, "loss": 9.0, "head_losses": [4.0], "backbone_loss": 0.02}
        for step in range(5)
    ]
    assert "held-out KL" in plots.drift(steps, [{"step": 4, "kl": 0.01}, {"step": 0, "kl": None}])
    assert "held-out KL" not in plots.drift(steps, [{"step": 4}])


def test_a_users_matplotlib_settings_change_no_drawing_and_are_left_alone():
    plain = speed_plots.accepted_lengths([1, 2])
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert speed_plots.accepted_lengths([1, 2]) == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_small_numbers_on_an_axis_keep_their_digits():
    drawn = plots.drift([{"step": step, "backbone_loss": step / 1000} for step in range(5)])
    assert ">0.001<" in drawn and ">0.004<" in drawn


def test_drawings_carry_no_colour_date_or_font_of_their_own():
    drawn = plots.tree([[0], [0, 0]], [0.5, 0.2]) + speed_plots.accepted_lengths([1, 2])
    assert not re.search(r"(fill|stroke): #|font-family|<metadata|<style|DOCTYPE|xmlns", drawn)
    assert drawn.isascii()
