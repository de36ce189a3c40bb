"""Headline figures, warnings and tables say what the report holds, and nothing else."""

from __future__ import annotations

import pytest

from pipeline.report.check_tables import check_table, methods_table
from pipeline.report.facts import (
    Outcome,
    check_outcome,
    headline_table,
    report_subtitle,
    report_title,
    report_warnings,
    speed_outcomes,
)
from pipeline.report.tables import chain_table, heads_table, sizes_table
from tests.report.conftest import TREE, typed


def figures_of(report: dict) -> dict[str, tuple[str, ...]]:
    """The values and notes of the headline by label."""
    return {row[0]: row[1:] for row in headline_table(typed(report)).rows}


@pytest.mark.parametrize(
    ("measured", "error", "num_warnings"),
    [
        (2.4, 0.3, 0),
        (2.9, 0.4, 0),  # together 0.5, of which 3 are 1.5
        (3.6, 0.4, 1),
        (0.4, 0.4, 1),
        (3.6, None, 0),
    ],
)
def test_a_rate_beyond_both_standard_errors_gives_a_warning(report, measured, error, num_warnings):
    expected = {"expected_acceleration_rate": 2.0, "expected_standard_error": 0.3}
    found = {"acceleration_rate": measured, "standard_error": error, "speedup": None}
    native, vllm = report["check"]["native"], report["check"]["vllm"]
    report["tree"] |= expected
    native |= found
    assert len(report_warnings(typed(report))) == num_warnings
    assert figures_of(report)["Acceleration rate"][1].endswith("; 2.00 ± 0.30 expected")
    native["acceptance"] = "typical"  # a greedy walk predicts nothing of it
    assert not report_warnings(typed(report))
    vllm |= found | expected  # held against the expectation of its own chain
    assert len(report_warnings(typed(report))) == num_warnings


@pytest.mark.parametrize(
    ("sequences", "error", "seen", "warned"),
    [
        (16, 0.4, 0.25, []),
        (15, 0.4, None, ["15 prompts"]),
        (16, 0.41, 0, ["2.00 ± 0.41"]),
        (16, 0.4, 0.471, ["47.1% of the check's answers"]),
    ],
)
def test_figures_of_little_text_are_warned_of(report, sequences, error, seen, warned):
    report["check"]["native"]["seen_share"] = seen
    report["check"]["native"]["greedy_match"]["sequences"] = sequences
    expected = {"expected_acceleration_rate": 2.0, "expected_standard_error": error}
    report["tree"] |= expected
    found = report_warnings(typed(report))
    assert len(found) == len(warned)
    for words, warning in zip(warned, found, strict=True):
        assert words in warning


def test_a_passed_check_counts_the_ties_of_all_engines(report):
    passed = "Check passed: greedy text as without heads"
    report["check"]["vllm"]["greedy_match"] |= {"identical": 30, "ties": 2}
    assert check_outcome(typed(report)).text == f"{passed}, except 3 of 64 sequences at ties"
    del report["check"]["native"], report["check"]["vllm"]
    assert check_outcome(typed(report)).text == passed


def test_the_speedup_is_an_outcome_for_each_engine(report):
    report["check"]["native"]["speedup"] = 0.62
    report["check"]["vllm"]["speedup"] = 1.31
    assert speed_outcomes(typed(report)) == [
        Outcome(None, "0.62x natively: slower with heads"),
        Outcome(True, "1.31x in vLLM, 32 prompts at once: faster with heads"),
    ]
    report["check"]["native"]["speedup"] = 0.9996
    report["check"]["vllm"]["speedup"] = None
    same = Outcome(None, "1.00x natively: as fast with heads")
    assert speed_outcomes(typed(report)) == [same]
    report["check"]["native"]["speedup"] = 2.5  # above the acceleration rate
    assert speed_outcomes(typed(report)) == []


@pytest.mark.parametrize(
    ("repeats", "plain", "is_tie"),
    [
        ([110, 120], [90, 100], False),
        ([95, 120], [90, 100], True),
        ([80, 95], [90, 100], True),
        ([80, 85], [90, 100], False),
        (None, None, False),
    ],
)
def test_a_speedup_in_vllm_within_the_scatter_is_no_gain(report, repeats, plain, is_tie):
    vllm = report["check"]["vllm"]
    vllm["speedup"] = 1.12
    vllm["loads"] = [
        {"method": "heads", "requests": 1, "range": [95, 99], "baseline_range": [90, 99]},
        {"method": "ngram", "requests": 32, "range": [95, 99], "baseline_range": [90, 99]},
        {"method": "heads", "requests": 32, "range": repeats, "baseline_range": plain},
    ]
    verdict = "within the scatter of its repeats" if is_tie else "faster with heads"
    outcome = Outcome(None if is_tie else True, f"1.12x in vLLM, 32 prompts at once: {verdict}")
    assert speed_outcomes(typed(report))[-1] == outcome


@pytest.mark.parametrize(
    ("engine", "figures"),
    [
        ("native", {"overhead": 0.97, "speedup": 2.7, "acceleration_rate": 2.4}),
        ("vllm", {"speedup": 2.0, "acceleration_rate": 1.8}),
    ],
)
def test_steps_faster_with_heads_than_without_are_doubted(report, engine, figures):
    report["check"][engine] |= figures
    assert len(report_warnings(typed(report))) == 1
    shown = figures_of(report)
    is_native = engine == "native"
    assert (shown["Overhead"][0] == shown["Speedup"][0] == "-") is is_native


def drawn(prompts: int, held_out: int) -> list[dict[str, object]]:
    """Two sources of equal size; the first gives all prompts that the second does not."""
    counts = {"a": (32 - prompts, 40), "b": (prompts, held_out)}
    return [
        {"source": name, "conversations": 900, "held_out": room, "prompts": number}
        for name, (number, room) in counts.items()
    ]


def test_a_source_with_too_few_held_out_rows_is_named(report):
    report["check"]["prompt_sources"] = drawn(4, 4)
    (warning,) = report_warnings(typed(report))
    assert "32 prompts: b 4 of 16." in warning


@pytest.mark.parametrize(
    ("part", "harmless", "harmful"),
    [
        ("train", {"draft_coverage": 0.95}, {"draft_coverage": 0.85}),
        ("train", {"steps": 9, "best_step": 9}, {"steps": 9, "best_step": 0}),
        ("seeds", {"warnings": None}, {"warnings": ["Too alike."]}),
        ("train", {"warnings": []}, {"warnings": ["Too few."]}),
        ("check", {"contaminated_rows": 0}, {"contaminated_rows": 3}),
        ("check", {"prompt_sources": drawn(16, 16)}, {"prompt_sources": drawn(4, 4)}),
    ],
)
def test_harmful_findings_of_stages_are_warnings(report, part, harmless, harmful):
    report[part] |= harmless
    assert not report_warnings(typed(report))
    report[part] |= harmful
    assert len(report_warnings(typed(report))) == 1


def test_a_chain_that_vllm_accepts_less_of_is_warned_of(report):
    vllm = report["check"]["vllm"]
    vllm |= {"acceleration_rate": 1.9, "same_text_acceleration_rate": 1.95}
    assert not report_warnings(typed(report))
    vllm["same_text_acceleration_rate"] = 2.1
    assert len(report_warnings(typed(report))) == 1


def test_the_headline_has_the_search_s_gain(report):
    assert "Search over stock tree" not in figures_of(report)
    names = {"stock (Vicuna-7B's)": 2.0, "searched, stock size": 2.25}
    trees = [{"tree": name, "nodes": 63, "acceleration_rate": r} for name, r in names.items()]
    report["check"]["native"]["studies"]["trees"] = trees
    assert figures_of(report)["Search over stock tree"][0] == "+12.5%"


def test_a_report_is_titled_by_its_run(report):
    report["target"] = "/home/me/models/chat-7b"
    assert report_title(typed(report)) == "try-3"
    assert report_subtitle(typed(report)) == (
        "Medusa heads, model unchanged, 2 heads, target chat-7b, 2024-05-06"
    )
    report["train"]["recipe"] = "joint"
    report["target"] = "owner/chat-7b"
    assert "2 heads, joint recipe, target owner/chat-7b" in report_subtitle(typed(report))


# --- tables


def test_sizes_and_chain_are_shown_with_their_expected_speedups(report):
    row = {"overhead": 1.25, "expected_acceleration_rate": 2.5, "expected_speedup": 2.0}
    row["expected_standard_error"] = 0.1
    report["tree"]["sizes"] = [row | {"nodes": 4}]
    report["tree"]["chain"] = [row | {"draft_tokens": 1, "new": {"answers": 9}}]
    tree = typed(report).tree
    assert sizes_table(tree).rows == [("4", "1.25x", "2.50 ± 0.10", "2.00x")]
    assert chain_table(tree).rows == [("1", "1.25x", "2.50 ± 0.10", "2.00x")]


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
    value, note = figures_of(report)["On new answers"]
    assert figures_of(report)["Acceleration rate"][0] == "2.30 ± 0.10"
    assert value == "2.10 ± 0.10" and "25" in note and "2.00 ± 0.10" in note
    assert ("acceleration rate on new answers", "2.10 ± 0.10", "-") in check_table(
        typed(report)
    ).rows
    for head in report["heads"]:
        head["new"] = {"labels": 9, "top1": 0.125, "top5": 0.375}
    assert all(row[-2:] == ("12.5%", "37.5%") for row in heads_table(typed(report)).rows)
    with_seen_answers(report, 7)
    assert figures_of(report)["On new answers"][0] == "only 7 new answers"


def test_expected_and_measured_are_compared_on_new_answers(report):
    """On all answers they are 1.7 apart: calibration has more seen ones. On new ones they agree."""
    with_seen_answers(report, 24)
    assert not report_warnings(typed(report))
    report["check"]["native"]["new"]["acceleration_rate"] = 3.0
    assert len(report_warnings(typed(report))) == 1


def test_every_method_is_measured_against_plain_decoding(report):
    native = report["check"]["native"]
    native["baseline_time_to_first_token"] = 0.031
    generate = {"name": "generate", "acceleration_rate": 1.0, "speedup": 0.93}
    generate |= {"tokens_per_second": 238.0, "time_to_first_token": 0.036}
    generate["greedy_match"] = {"sequences": 32, "identical": 30, "ties": 2}
    native["baselines"] = [generate, {"name": "prompt-lookup", "failed": "its cache."}]
    assert methods_table(typed(report)).rows == [
        ("plain", "1.00", "256", "1.00x", "31 ms", "-"),
        ("with heads", "1.99", "412", "1.61x", "34 ms", "31/32"),
        ("generate", "1.00", "238", "0.93x", "36 ms", "30/32"),
        ("prompt lookup", "-", "-", "-", "-", "-"),
    ]
    del report["check"]
    assert methods_table(typed(report)).rows == []


def test_a_datastore_is_described_below_the_methods(report):
    datastore = {"tokens": 12345, "build_seconds": 0.25}
    own = {"name": "retrieval", "datastore": datastore, "drafted_share": 0.875}
    report["check"]["native"]["baselines"] = [own]
    assert methods_table(typed(report)).note.endswith(
        "retrieval drafts from 12,345 tokens of training text, indexed in 250 ms, and has a guess"
        " in 87.5% of its steps."
    )
