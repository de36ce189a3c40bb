"""All ways to decode side by side: ours, transformers' own, vLLM's."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipeline.report.check_tables import check_table, methods_table
from pipeline.report.html import page
from pipeline.report.terminal import print_report


@pytest.fixture
def measured(report):
    report["check"]["native"] |= {
        "repeats": 3,
        "time_per_output_token": 0.0024,
        "baseline_time_to_first_token": 0.031,
        "baseline_time_per_output_token": 0.0039,
        "baselines": [
            {
                "name": "generate",
                "acceleration_rate": 1.0,
                "speedup": 0.93,
                "tokens_per_second": 238.0,
                "time_to_first_token": 0.036,
                "time_per_output_token": 0.0042,
                "greedy_match": {"sequences": 32, "identical": 30, "ties": 2},
            },
            {"name": "prompt-lookup", "failed": "its cache <b>cannot</b> be cropped."},
        ],
    }
    report["check"]["vllm"] |= {
        "tokens_per_second": 900.0,
        "baseline_tokens_per_second": 1000.0,
        "speedup": 0.9,
    }
    return report


def test_every_method_has_a_row_and_plain_decoding_is_the_measure(measured):
    table = methods_table(measured)
    assert table.rows == (
        ("plain", "1.00", "256", "1.00x", "31 ms", "3.9 ms", "-"),
        ("with heads", "1.99", "412", "1.61x", "34 ms", "2.4 ms", "31/32"),
        ("generate", "1.00", "238", "0.93x", "36 ms", "4.2 ms", "30/32"),
        ("prompt lookup", "failed", "-", "-", "-", "-", "-"),
        ("vLLM plain", "1.00", "1,000", "1.00x", "-", "-", "-"),
        ("vLLM with heads", "1.71", "900", "0.90x", "-", "-", "32/32"),
    )
    assert "3 repetitions" in table.note
    assert table.note.endswith("prompt lookup failed: its cache <b>cannot</b> be cropped.")


@pytest.mark.slow
def test_the_page_has_them_and_escapes_what_a_model_s_code_said(measured, extras):
    text = page(measured, extras)
    assert ">generate" in text and "&lt;b&gt;cannot" in text and "<b>cannot" not in text


def test_without_a_check_there_is_no_row(report):
    del report["check"]
    assert methods_table(report).rows == ()


def test_a_sampled_rule_shows_how_likely_the_target_finds_its_text(report):
    report["check"]["native"] |= {
        "acceptance": "typical",
        "temperature": 0.7,
        "eps": 0.09,
        "delta": 0.3,
        "first_token": "sampled",
        "tie_tolerance": 0.001,
        "log_likelihood": {"greedy": -0.412, "sampling": -1.03, "typical": -0.5},
    }
    rows = {row[0]: row[1:] for row in check_table(report).rows}
    assert rows["acceptance"] == (
        "typical, temperature 0.7, eps 0.09, delta 0.3, first token sampled",
        "-",
    )
    assert rows["greedy ties"][0].endswith("; a top-2 gap under 0.001 is one")
    assert rows["log-likelihood, nats per token"] == (
        "greedy -0.41, sampling -1.03, typical -0.50",
        "-",
    )


@pytest.mark.parametrize(("with_heads", "said"), [("V2", "V2"), ("V1", "plain V2, with heads V1")])
def test_vllm_s_model_runners_are_named_and_both_where_they_differ(report, with_heads, said):
    report["check"]["vllm"]["model_runners"] = {"plain": "V2", "with heads": with_heads}
    rows = {row[0]: row[1:] for row in check_table(report).rows}
    assert rows["vLLM's model runner"] == ("-", said)


def test_in_a_terminal_of_80_columns_every_method_stays_on_its_line(measured):
    measured["check"]["native"]["baselines"][0]["name"] = "prompt-lookup"
    buffer = io.StringIO()
    print_report(measured, Console(file=buffer, width=80))
    firsts = {line.split("  ")[0] for line in buffer.getvalue().splitlines()}
    assert {"plain", "with heads", "prompt lookup", "vLLM plain", "vLLM with heads"} <= firsts
