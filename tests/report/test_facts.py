"""Headline figures, warnings and tables say what the report holds, and nothing else."""

from __future__ import annotations

import pytest

from pipeline.report.check_tables import methods_table
from pipeline.report.facts import (
    Outcome,
    report_subtitle,
    report_title,
    speed_outcomes,
)
from pipeline.report.tables import sizes_table
from tests.report.conftest import figures_of, typed, with_seen_answers


@pytest.mark.parametrize("engine", ["native", "vllm"])
@pytest.mark.parametrize(
    ("speed", "repeats", "is_good", "verdict"),
    [
        (114, [110, 120], True, "1.20x {} (1.10 to 1.33): faster with heads"),
        (114, [95, 120], None, "1.20x {} (0.95 to 1.33): within the repeats of plain decoding"),
        (85.5, [80, 89], None, "0.90x {} (0.80 to 0.99): slower with heads"),
        (114, None, None, "1.20x {} (one repeat)"),
    ],
)
def test_a_speedup_is_good_beyond_the_repeats(report, engine, speed, repeats, is_good, verdict):
    """One rule for both engines."""
    check = report["check"]
    plain = {"baseline_tokens_per_second": 95, "baseline_range": [90, 100]}
    check[engine] |= plain | {"tokens_per_second": speed, "range": repeats}
    del check["vllm" if engine == "native" else "native"]
    where = "natively" if engine == "native" else "in vLLM, 32 prompts at once"
    assert speed_outcomes(typed(report)) == [Outcome(is_good, verdict.format(where))]


def test_a_disturbed_speedup_is_no_outcome(report):
    assert len(speed_outcomes(typed(report))) == 1
    report["check"]["native"]["speedup"] = 2.5  # above the acceleration rate
    assert speed_outcomes(typed(report)) == []


def test_the_ranges_of_the_repeats_stand_beside_the_speeds(report):
    report["check"]["native"] |= {"range": [400, 420], "baseline_range": [250, 260.4]}
    shown = figures_of(report)
    assert shown["tokens/s, plain"] == "256 (250 to 260)"
    assert shown["speedup"] == "1.61x (1.54 to 1.68)"
    plain, with_heads = methods_table(typed(report)).rows
    assert (plain[2], with_heads[2:4]) == (
        "256 (250 to 260)",
        ("412 (400 to 420)", "1.61x (1.54 to 1.68)"),
    )


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


def test_a_checked_report_has_one_overhead_of_its_tree(report):
    """Other tables are relative to the tree and chain in use, here twice as slow as the next."""
    rates = {"expected_acceleration_rate": 2.5, "expected_standard_error": 0.1}
    costs = {2: {"overhead": 1.0, "expected_speedup": 2.5}}
    costs[5] = {"overhead": 2.0, "expected_speedup": 1.25}
    report["tree"]["sizes"] = [rates | cost | {"nodes": size} for size, cost in costs.items()]
    found = typed(report)
    assert sizes_table(found).rows == [
        ("2", "2.50 ± 0.10", "0.50x", "2.00x"),
        ("5", "2.50 ± 0.10", "1.00x", "1.00x"),
    ]
    assert figures_of(report)["overhead"] == "1.23x"
    del report["check"]
    assert sizes_table(typed(report)).rows[1] == ("5", "2.50 ± 0.10", "2.00x", "1.25x")


def test_the_rate_on_new_answers_is_separate(report):
    assert figures_of(report)["rate on new answers"] == "-"
    with_seen_answers(report, 24)
    found = figures_of(report)
    assert (found["acceleration rate"], found["expected"]) == ("2.30 ± 0.10", "4.00 ± 0.20")
    assert found["rate on new answers"] == "2.10 ± 0.10"
    assert found["expected on new answers"] == "2.00 ± 0.10"
    with_seen_answers(report, 7)
    assert figures_of(report)["rate on new answers"] == "only 7 new answers"


def test_every_method_is_measured_against_plain_decoding(report):
    native = report["check"]["native"]
    generate = {"name": "generate", "acceleration_rate": 1.0, "speedup": 0.93}
    generate |= {"tokens_per_second": 238.0}
    generate["greedy_match"] = {"sequences": 32, "identical": 30, "ties": 2, "tokens": 2048}
    native["baselines"] = [generate, {"name": "prompt-lookup", "failed": "its cache."}]
    table = methods_table(typed(report))
    assert table.rows == [
        ("plain", "1.00", "256", "1.00x", "-"),
        ("heads", "1.99", "412", "1.61x", "31/32"),
        ("generate", "1.00", "238", "0.93x", "30/32"),
        ("prompt lookup", "-", "-", "-", "-"),
    ]
    assert table.note.endswith("prompt lookup failed: its cache.")
