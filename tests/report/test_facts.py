"""Headline figures, warnings and tables say what the report holds, and nothing else."""

from __future__ import annotations

import pytest

from pipeline.report.check_tables import check_table, methods_table
from pipeline.report.facts import headline, warnings
from pipeline.report.tables import chain_table, drift_table, heads_table, sizes_table, tree_table
from tests.report.conftest import TREE, typed


def figures_of(report: dict) -> dict:
    return {figure.label: figure for figure in headline(typed(report))}


def rows_of(report: dict) -> dict[str, tuple[str, ...]]:
    """The rows of the check's table by label."""
    return {row[0]: row[1:] for row in check_table(typed(report)).rows}


@pytest.mark.parametrize(
    ("measured", "error", "says"),
    [
        (2.4, 0.3, ()),
        (2.9, 0.4, ()),  # together 0.5, of which 3 are 1.5
        (3.6, 0.4, ("80% above the expected one, 3.2 standard errors",)),
        (0.4, 0.4, ("80% below the expected one, 3.2 standard errors",)),
        (3.6, None, ()),
    ],
)
def test_a_rate_beyond_both_standard_errors_gives_a_warning(report, measured, error, says):
    report["tree"] |= {"expected_acceleration_rate": 2.0, "expected_standard_error": 0.3}
    native = report["check"]["native"]
    native |= {"acceleration_rate": measured, "standard_error": error}
    del native["speedup"]
    found = warnings(typed(report))
    assert len(found) == len(says) and all(words in found[i] for i, words in enumerate(says))
    assert figures_of(report)["Acceleration rate"].note.endswith("; 2.00 ± 0.30 expected")
    native["acceptance"] = "typical"  # a greedy walk predicts nothing of it
    assert not warnings(typed(report))


def test_vllm_s_rate_is_held_against_the_chain_s(report):
    expected = {"expected_acceleration_rate": 2.5, "expected_standard_error": 0.1}
    vllm = report["check"]["vllm"]
    vllm |= expected | {"standard_error": 0.1, "num_speculative_tokens": 2}
    (found,) = warnings(typed(report))  # measured 1.713
    assert "vLLM" in found and "31% below the expected one, 5.6 standard errors" in found
    figure = figures_of(report)["vLLM acceleration rate"]
    assert figure.value == "1.71 ± 0.10"
    assert figure.note == "top-1 chain of 2, no tree; 2.50 ± 0.10 expected; greedy identical 32/32"


@pytest.mark.parametrize(
    ("expected", "measured", "says"),
    [
        ([0.8, 1.2], 1.1, None),
        ([0.8, 0.94], 0.9, "no expected speedup is above 1, the best 0.94x"),
        ([0.8, 0.94], None, "no expected speedup is above 1, the best 0.94x"),
        ([0.8, 0.94], 1.1, "the best 0.94x, and the check measured 1.10x"),
        ([0.8, 1.2], 0.7, "the measured speedup is 0.70x"),
        ([], 0.7, "the measured speedup is 0.70x"),
    ],
)
def test_a_tree_that_does_not_pay_is_warned_of(report, expected, measured, says):
    sizes = [{"nodes": 4, "expected_speedup": speedup} for speedup in expected]
    report["tree"]["sizes"] = sizes
    report["check"]["native"]["speedup"] = measured
    found = warnings(typed(report))
    assert not found if says is None else says in found[0]


@pytest.mark.parametrize(
    ("engine", "figures"),
    [
        ("native", {"overhead": 0.97, "speedup": 2.5, "acceleration_rate": 2.4}),
        ("vllm", {"speedup": 1.9, "acceleration_rate": 1.8}),
    ],
)
def test_steps_faster_with_heads_than_without_are_doubted(report, engine, figures):
    assert not warnings(typed(report))
    report["check"][engine] |= figures
    (said,) = warnings(typed(report))
    speedup, reached = figures["speedup"], figures["acceleration_rate"]
    assert f"the speedup of {speedup:.2f}x at an acceleration rate of {reached}" in said
    shown = figures_of(report)
    is_native = engine == "native"
    assert (shown["Overhead"].value == shown["Speedup"].value == "-") is is_native
    assert ("see the warning" in shown["Speedup"].note) is is_native


@pytest.mark.parametrize(
    ("part", "harmless", "harmful", "says"),
    [
        ("train", {"draft_coverage": 0.95}, {"draft_coverage": 0.85}, "Only 85.0% of held-out"),
        ("train", {"steps": 9, "best_step": 9}, {"steps": 9, "best_step": 0}, "None of 9 steps"),
        ("seeds", {"warnings": None}, {"warnings": ["Too alike."]}, "Too alike."),
        ("train", {"warnings": []}, {"warnings": ["Too few."]}, "Too few."),
        ("check", {"contaminated_rows": 0}, {"contaminated_rows": 3}, "3 training rows hold"),
    ],
)
def test_harmful_findings_of_stages_are_warnings(report, part, harmless, harmful, says):
    report[part] |= harmless
    assert not warnings(typed(report))
    report[part] |= harmful
    (found,) = warnings(typed(report))
    assert says in found


def test_a_chain_that_vllm_accepts_less_of_is_warned_of(report):
    vllm = report["check"]["vllm"]
    vllm |= {"acceleration_rate": 1.9, "same_text_acceleration_rate": 1.95}
    assert not warnings(typed(report))
    vllm["same_text_acceleration_rate"] = 2.1
    assert "1.90, and the same chain reaches 2.10 natively" in warnings(typed(report))[0]


@pytest.mark.parametrize(
    ("equal", "ties", "note"),
    [
        (32, 0, "sequences equal to plain decoding"),
        (30, 2, "2 more equal up to a tie"),
        (29, 1, "1 more equal up to a tie, 2 not equal"),
    ],
)
def test_differing_sequences_are_counted_beside_the_ties(report, equal, ties, note):
    match = {"sequences": 32, "identical": equal, "ties": ties}
    report["check"]["native"]["greedy_match"] = match
    figure = figures_of(report)["Greedy identical"]
    assert (figure.value, figure.note) == (f"{equal}/32", note)


def test_the_headline_has_the_search_s_gain(report):
    assert "Search over stock tree" not in figures_of(report)
    names = {"stock (Vicuna-7B's)": 2.0, "searched, stock size": 2.25, "the export's": 1.9}
    trees = [{"tree": name, "nodes": 63, "acceleration_rate": r} for name, r in names.items()]
    report["check"]["native"]["studies"]["trees"] = trees
    figure = figures_of(report)["Search over stock tree"]
    assert figure.value == "+12.5%"
    assert figure.note.endswith("2.00, searched tree of the same size 2.25, used tree 1.90")


# --- tables


def test_both_searches_are_reported_whichever_was_better(report):
    report["tree"]["searches"] = {"product": 2.353, "joint": 2.334}
    note = tree_table(typed(report), None).note
    assert "the product search reaches 2.35, the joint search reaches 2.33." in note


def test_sizes_are_shown_with_their_expected_speedups(report):
    size = {"nodes": 4, "overhead": 1.25, "expected_acceleration_rate": 2.5}
    assert sizes_table(typed(report).tree).rows == []
    report["tree"]["sizes"] = [size | {"expected_speedup": 2.0}]
    table = sizes_table(typed(report).tree)
    assert table.rows == [("4", "1.25x", "2.50", "2.00x")]
    assert table.note == "The joint search; 5 nodes are used, the fastest up to 5 %."


def test_the_chain_has_overheads_where_they_were_timed(report):
    assert chain_table(typed(report).tree).rows == []
    row = {"draft_tokens": 1, "expected_acceleration_rate": 1.5, "new": {"answers": 9}}
    row["expected_standard_error"] = 0.1
    report["tree"]["chain"] = [row]
    table = chain_table(typed(report).tree)
    assert (table.columns, table.rows) == (["tokens", "expected rate"], [("1", "1.50 ± 0.10")])
    row |= {"overhead": 1.2, "expected_speedup": 1.25}
    table = chain_table(typed(report).tree)
    assert table.rows == [("1", "1.20x", "1.50 ± 0.10", "1.25x")]
    assert "the fastest up to 5 % by native overheads; 1 would accept most" in table.note


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "The tuned target against the original,"),
        ({"quantization": "4bit"}, "against the original in 4bit, in which it was trained,"),
        ({"adapter_drift": {}}, "The published weights against the original,"),
    ],
)
def test_drift_names_the_copies_that_it_compares(report, changes, says):
    report["train"] |= changes
    assert says in drift_table(typed(report)).note


def with_seen_answers(report: dict, num_new: int) -> None:
    """32 answers of the check, `num_new` of them new, and 40 of calibration, ten of them seen."""
    expected = {"expected_acceleration_rate": 4.0, "expected_standard_error": 0.2}
    new = {"answers": 30, "expected_acceleration_rate": 2.0, "expected_standard_error": 0.1}
    report["tree"] = TREE | expected | {"seen_share": 0.25, "new": new}
    new = {"answers": num_new}
    if num_new >= 8:
        new |= {"acceleration_rate": 2.1, "standard_error": 0.1}
    native = {"acceleration_rate": 2.3, "standard_error": 0.1, "new": new}
    report["check"]["native"] |= native | {"seen_share": 1 - num_new / 32}


def test_the_rate_on_new_answers_is_separate(report):
    assert "On new answers" not in figures_of(report)
    assert len(heads_table(typed(report)).columns) == 2 + 5
    with_seen_answers(report, 24)
    figure = figures_of(report)["On new answers"]
    assert figures_of(report)["Acceleration rate"].value == "2.30 ± 0.10"
    assert figure.value == "2.10 ± 0.10" and "25" in figure.note and "2.00 ± 0.10" in figure.note
    assert rows_of(report)["acceleration rate on new answers"][0] == "2.10 ± 0.10"
    assert rows_of(report)["expected on new answers"][0] == "2.00 ± 0.10"
    for head in report["heads"]:
        head["new"] = {"labels": 9, "top1": 0.125, "top5": 0.375}
    assert all(row[-2:] == ("12.5%", "37.5%") for row in heads_table(typed(report)).rows)
    with_seen_answers(report, 7)
    assert figures_of(report)["On new answers"].value == "only 7 new answers"


def test_expected_and_measured_are_compared_on_new_answers(report):
    """On all answers they are 1.7 apart: calibration has more seen ones. On new ones they agree."""
    with_seen_answers(report, 24)
    assert not warnings(typed(report))
    report["check"]["native"]["new"]["acceleration_rate"] = 3.0
    assert len(warnings(typed(report))) == 1


def test_every_method_is_measured_against_plain_decoding(report):
    native, vllm = report["check"]["native"], report["check"]["vllm"]
    native |= {"repeats": 3, "time_per_output_token": 0.0024}
    native["baseline_time_to_first_token"] = 0.031
    native["baseline_time_per_output_token"] = 0.0039
    generate = {"name": "generate", "acceleration_rate": 1.0, "speedup": 0.93}
    generate |= {"tokens_per_second": 238.0, "time_to_first_token": 0.036}
    generate |= {"time_per_output_token": 0.0042}
    generate["greedy_match"] = {"sequences": 32, "identical": 30, "ties": 2}
    native["baselines"] = [generate, {"name": "prompt-lookup", "failed": "its cache."}]
    vllm |= {"tokens_per_second": 900.0, "baseline_tokens_per_second": 1000.0, "speedup": 0.9}
    table = methods_table(typed(report))
    assert table.rows == [
        ("plain", "1.00", "256", "1.00x", "31 ms", "3.9 ms", "-"),
        ("with heads", "1.99", "412", "1.61x", "34 ms", "2.4 ms", "31/32"),
        ("generate", "1.00", "238", "0.93x", "36 ms", "4.2 ms", "30/32"),
        ("prompt lookup", "failed", "-", "-", "-", "-", "-"),
        ("vLLM plain", "1.00", "1,000", "1.00x", "-", "-", "-"),
        ("vLLM with heads", "1.71", "900", "0.90x", "-", "-", "32/32"),
    ]
    assert "3 repetitions" in table.note and table.note.endswith("failed: its cache.")
    del report["check"]
    assert methods_table(typed(report)).rows == []


def test_the_check_s_table_has_rule_likelihood_and_ties(report):
    sampled = {"acceptance": "typical", "temperature": 0.7, "eps": 0.09, "delta": 0.3}
    report["check"]["native"] |= sampled | {"first_token": "sampled", "tie_tolerance": 0.001}
    report["check"]["native"]["log_likelihood"] = {"greedy": -0.412, "typical": -0.5}
    rule = "typical, temperature 0.7, eps 0.09, delta 0.3, first token sampled"
    assert rows_of(report)["acceptance"] == (rule, "-")
    assert rows_of(report)["greedy ties"][0].endswith("; a top-2 gap under 0.001 is one")
    likelihoods = ("greedy -0.41, typical -0.50", "-")
    assert rows_of(report)["log-likelihood, nats per token"] == likelihoods
