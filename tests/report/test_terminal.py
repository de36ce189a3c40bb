"""print_report: what a person reads at the end of a run, and what a log file keeps of it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipeline.report.terminal import print_report


def _printed(report: dict, extras: dict | None = None, **options) -> str:
    buffer = io.StringIO()
    print_report(report, Console(file=buffer, **options), extras)
    return buffer.getvalue()


def test_headline_stages_heads_tree_and_quarantine_are_printed(report, extras):
    lines = [" ".join(line.split()) for line in _printed(report, extras, width=100).splitlines()]
    for start in (
        "Heads for someone/chat-7b",
        "check passed",
        "Acceleration rate 1.99",
        "Overhead 1.23x",
        "Speedup 1.61x",
        "Greedy identical 31/32 1 more equal up to a tie",
        "vLLM acceleration rate 1.71",
        "Target's own text 0.93 distinct-4; mean entropy 1.07 nats",
        "Tokens/s, plain 256",
        "Tokens/s, with heads 412",
        "seeds 1,200 17 1.2 s",
        "push not run",
        "1 t+3 40.0% 50.0% 60.0% 61.0% 66.0%",
        "Tree 5 nodes, expected acceleration rate 2.10.",
        "writing 22 1.10 258 230 0.89x",
        "perplexity, tuned 3.250",
        "top-1 chain 4 1.90 1.20x 1.58x",
        "generate degenerate-loop 20",
    ):
        assert any(line.startswith(start) for line in lines), start


def test_the_methods_are_whole_in_80_columns(report, extras):
    lines = [line.split() for line in _printed(report, extras, width=80).splitlines()]
    assert [
        "method",
        "per",
        "step",
        "tokens/s",
        "speedup",
        "to",
        "first",
        "per",
        "token",
        "identical",
    ] in lines
    assert ["with", "heads", "1.99", "412", "1.61x", "34", "ms", "-", "31/32"] in lines


@pytest.mark.parametrize("width", [60, 80, 100, 240])
def test_output_is_plain_and_fits_in_100_columns_off_a_terminal(report, extras, width):
    report["target"] = "/some/where/" + "very-long-name-" * 20
    report["check"]["failures"] = ["A sentence. " * 30]
    printed = _printed(report, extras, width=width)
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= min(width, 100)


def test_nothing_in_a_text_is_taken_for_markup_or_a_control_sequence(report):
    report["target"] = "[red]x[/red] [link=a]\x1b[31mred\x07"
    report["quarantine"] = {"[bold]": {"[/nope]": 3}}
    printed = _printed(report, width=100)
    assert "[red]x[/red] [link=a]" in printed and "[bold]" in printed and "[/nope]" in printed
    assert "\x1b" not in printed and "\x07" not in printed


@pytest.mark.parametrize(
    ("equal", "ties", "note"),
    [
        (32, 0, "32/32 sequences equal to plain decoding"),
        (30, 2, "30/32 2 more equal up to a tie"),
        (29, 1, "29/32 1 more equal up to a tie, 2 not equal"),
        (31, 0, "31/32 1 not equal"),
    ],
)
def test_sequences_that_differ_are_counted_beside_the_ties(report, equal, ties, note):
    report["check"]["native"]["greedy_match"] = {"sequences": 32, "identical": equal, "ties": ties}
    assert f"Greedy identical {note}" in " ".join(_printed(report, width=100).split())


def test_a_terminal_gets_colours(report):
    assert "\x1b[" in _printed(report, force_terminal=True, width=100, color_system="standard")


def test_a_run_stopped_half_way_says_not_run():
    printed = _printed(
        {"target": "t", "seeds": {"rows": 5, "quarantined": 0}, "seconds_by_stage": {"seeds": 1.0}},
        width=80,
    )
    assert "check not run" in printed
    assert "Heads: not run" in printed and "Tree: not run" in printed


def test_failures_are_printed(report):
    report["check"] |= {"passed": False, "failures": ["vLLM accepted nothing."]}
    assert (
        "check failed" in (printed := _printed(report, width=100))
        and "- vLLM accepted nothing." in printed
    )


def test_numbers_that_are_not_finite_are_printed_as_unknown(report):
    report["check"]["native"]["speedup"] = float("nan")
    assert "nan" not in _printed(report, width=100).lower()
