"""What to serve: one line for each load, from the measured rows alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.artifacts.check_result import (
    CheckFigures,
    GreedyMatch,
    LoadRow,
    ServedMethod,
    Studies,
    VllmFigures,
)
from pipeline.report.report import Report, RunFacts
from pipeline.report.text_table import markdown_section
from pipeline.report.warnings import report_warnings
from pipeline.report.what_to_serve import serving_advice, what_to_serve_table

EXACT = GreedyMatch(16, 16, 0, 500)
SERVE = "medusa-distill serve RUN_DIR"
PLAIN_RANGE = [95, 105]


def row(method: str, requests: int, speed: float, *repeats: float, **more) -> LoadRow:
    """The speed of a method beside plain decoding's 100, 95 to 105 tokens/s."""
    plain = {"baseline_tokens_per_second": 100.0, "baseline_range": PLAIN_RANGE}
    more = plain | {"range": list(repeats) or None} | more
    return LoadRow(method=method, requests=requests, tokens_per_second=speed, **more)


def report_of(*rows: LoadRow, match: GreedyMatch = EXACT, **more) -> Report:
    """A report with these loads; the greedy text of the heads has this match."""
    config = {"method": "eagle", "num_speculative_tokens": 5}
    methods = [
        ServedMethod(name="heads", acceleration_rate=2.0, greedy_match=match),
        ServedMethod(name="heads with 5 drafts", speculative_config=config),
        ServedMethod(name="ngram", acceleration_rate=1.1, speculative_config={"method": "ngram"}),
        ServedMethod(name="suffix", failed="It died."),
    ]
    vllm = VllmFigures(
        acceleration_rate=2.0,
        greedy_match=match,
        methods=methods,
        loads=list(rows),
        failed_loads={"suffix": "too slow"},
        **more,
    )
    run = RunFacts(name="demo", date="2026-11-26", fingerprints={})
    return Report(run=run, check=CheckFigures(vllm=vllm, passed=True, failures=[]))


def lines_of(*rows: LoadRow, **more) -> list[str]:
    return [advice.line for advice in serving_advice(report_of(*rows, **more))]


def test_each_load_has_one_line_and_its_command():
    """150/100, 140/105 and 160/95."""
    report = report_of(
        row("heads", 1, 150, 140, 160),
        row("heads", 8, 80, 78, 85),
        row("ngram", 1, 120, 118, 122),
        row("ngram", 8, 90, 88, 92),
    )
    one, eight = serving_advice(report)
    assert one.line == "1 request at a time: heads, 1.50x plain (1.33 to 1.68)."
    assert (one.method, one.command) == ("heads", SERVE)
    assert eight.line == "8 at a time: plain vLLM."
    assert (eight.method, eight.command) == ("plain", f"{SERVE} --plain")


@pytest.mark.parametrize(
    ("rows", "served"),
    [
        (
            [row("heads", 8, 116, 98, 140), row("ngram", 8, 97, 90, 102)],
            "plain vLLM; within its repeats: heads (1.16x, 0.93 to 1.47)",
        ),
        (
            [row("heads", 8, 97, 90, 104)],
            "plain vLLM; within its repeats: heads (0.97x, 0.86 to 1.09)",
        ),
        (
            [row("heads", 8, 130, 115, 140), row("ngram", 8, 120, 110, 125)],
            "ngram, 1.20x plain (1.05 to 1.32); within its repeats: heads (1.08x, 0.92 to 1.27)",
        ),
        (
            [row("heads", 8, 120, 115, 140), row("heads with 5 drafts", 8, 130, 110, 135)],
            "heads with 5 drafts, 1.30x plain (1.05 to 1.42); within its repeats: heads"
            " (0.92x, 0.85 to 1.27)",
        ),
        ([row("heads", 8, 120)], "heads, 1.20x plain (one repeat)"),
        (
            [row("heads", 8, 104)],
            "plain vLLM; within its repeats: heads (1.04x, one repeat)",
        ),
    ],
)
def test_within_the_repeats_the_simpler_method_is_named(rows, served):
    assert lines_of(*rows) == [f"8 at a time: {served}."]


def test_a_method_with_another_text_is_not_served():
    rows = [row("heads", 8, 150, 149, 151), row("ngram", 8, 120, 119, 121)]
    (line,) = lines_of(*rows, match=GreedyMatch(32, 31, 0, 500))
    assert line.startswith("8 at a time: ngram, 1.20x plain")
    (line,) = lines_of(*rows, match=GreedyMatch(32, 31, 1, 500))
    assert line.startswith("8 at a time: heads, 1.50x plain"), "it differs at a tie"


def test_a_method_that_failed_in_the_check_is_not_served():
    """Its text was never compared."""
    [line] = lines_of(row("heads", 8, 50, 48, 52), row("suffix", 8, 200, 190, 210))
    assert "plain vLLM" in line and "suffix" not in line


def test_a_disturbed_method_is_named_also_beside_others():
    disturbed = row("heads", 1, 272, 270, 275, speedup=2.72, acceleration_rate=1.78)
    report = report_of(disturbed, row("ngram", 1, 100, 95, 105, speedup=1.0, acceleration_rate=1.1))
    [warning] = [each for each in report_warnings(report) if "Another process" in each]
    assert "heads" in warning and "ngram" not in warning


@pytest.mark.parametrize(
    ("prompts", "seen", "rough"),
    [
        (16, 0.25, []),
        (15, None, ["Rough figures: the check decoded 15 prompts. Check with 32 or more"]),
        (16, 0.26, ["Rough figures: 26.0% of its answers are in the training text. Check"]),
    ],
)
def test_few_prompts_or_seen_answers_want_another_check(prompts, seen, rough):
    match = GreedyMatch(prompts, prompts, 0, 500)
    report = report_of(row("heads", 1, 150, 140, 160), match=match, seen_share=seen)
    *found, last = what_to_serve_table(report).points
    assert len(found) == len(rough) and last.startswith("1 request at a time: heads")
    assert all(line.startswith(words) for line, words in zip(found, rough, strict=True))


def test_the_table_has_the_ranges_that_decide():
    report = report_of(
        row("heads", 1, 150, 140, 160),
        row("heads", 32, 103, 98, 120),
        row("ngram", 1, 120),
        row("ngram", 32, 90, 88, 92),
    )
    table = what_to_serve_table(report)
    assert [cells[0] for cells in table.rows] == ["plain", "heads", "ngram"]
    assert table.rows[0][3:] == ("100 (95 to 105)",) * 2
    assert table.rows[1][3:] == ("150 (140 to 160)", "103 (98 to 120)")
    assert table.rows[2][3] == "120"
    assert "suffix failed: It died.. suffix failed under load: too slow." in table.note
    section = markdown_section(table)
    assert section.startswith("## What to serve\n\n- 1 request at a time: heads")
    assert section.endswith(
        f"\n\n```bash\n{SERVE}  # 1 at a time\n{SERVE} --plain  # 32 at a time\n```"
    )
    alone = what_to_serve_table(replace(report, run=None))  # heads that were measured without a run
    assert not alone.commands and "RUN_DIR" not in alone.note and alone.rows == table.rows
    assert what_to_serve_table(Report()).rows == []


def test_the_load_study_replaces_the_check_s_own_loads():
    load = [row("ngram", 4, 150, 140, 160)]
    (line,) = lines_of(row("heads", 1, 150, 140, 160), studies=Studies(load=load))
    assert line.startswith("4 at a time: ngram")
    ngram = serving_advice(report_of(*load))[0].command
    assert ngram == f'{SERVE} --plain -- --speculative-config \'{{"method": "ngram"}}\''
    five = serving_advice(report_of(row("heads with 5 drafts", 4, 150, 140, 160)))[0].command
    assert five == f"{SERVE} --draft-tokens 5"
