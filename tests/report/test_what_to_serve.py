"""The table of what to serve."""

from __future__ import annotations

from dataclasses import replace

from pipeline.artifacts.check_result import (
    CheckFigures,
    GreedyMatch,
    LoadRow,
    NativeFigures,
    ServedMethod,
    ServingAdvice,
    ServingChoice,
    VllmFigures,
)
from pipeline.report.report import Report, RunFacts
from pipeline.report.text_table import markdown_section
from pipeline.report.what_to_serve import what_to_serve_table

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
FIVE = {"method": "eagle", "num_speculative_tokens": 5}


def choice(requests: int, method: str, second: str, *, is_beyond=True, margin=None):
    return ServingChoice(
        requests=requests,
        method=method,
        second=second,
        is_beyond_scatter=is_beyond,
        margin=margin,
    )


def report_of(*choices: ServingChoice, failed: str | None = None) -> Report:
    match = GreedyMatch(2, 2, 0)
    methods = [
        ServedMethod(name="heads", acceleration_rate=2.0, greedy_match=match),
        ServedMethod(name="heads, 5", speculative_config=FIVE, greedy_match=match),
        ServedMethod(name="ngram", speculative_config=NGRAM, greedy_match=match),
        ServedMethod(name="suffix", failed=failed),
    ]
    loads = []
    for name in ("heads", "heads, 5", "ngram"):
        for requests in (1, 32):
            loads.append(
                LoadRow(
                    method=name,
                    requests=requests,
                    tokens_per_second=150.0 * requests,
                    baseline_tokens_per_second=100.0 * requests,
                )
            )
    vllm = VllmFigures(
        acceleration_rate=2.0,
        greedy_match=match,
        methods=methods,
        loads=loads,
        choices=list(choices),
        advice=[
            ServingAdvice(
                loads="1 and 32 at a time", text="Serve it.", command="medusa-distill serve RUN_DIR"
            )
        ],
        failed_loads={"suffix": "too slow"},
    )
    native = NativeFigures(acceleration_rate=2.0, greedy_match=match)
    run = RunFacts(name="demo", date="2026-11-26", fingerprints={})
    check = CheckFigures(native=native, vllm=vllm, passed=True, failures=[])
    return Report(run=run, target="my/model", check=check)


def test_the_fastest_of_each_load_is_marked():
    found = report_of(
        choice(1, "heads", "ngram", margin=0.25),
        choice(32, "plain", "heads"),
        failed="broken",
    )
    table = what_to_serve_table(found)
    rows = {row[0]: row for row in table.rows}
    assert list(rows) == ["plain", "heads", "heads, 5", "ngram", "margin over the next"]
    assert rows["margin over the next"][3:] == ("25.0% over ngram", "-")
    assert [cell.endswith("(fastest)") for cell in rows["plain"][3:]] == [False, True]
    assert [cell.endswith("(fastest)") for cell in rows["heads"][3:]] == [True, False]
    assert not any("(fastest)" in cell for cell in rows["ngram"])
    assert table.points == ["Serve it."] and "RUN_DIR is this run's directory." in table.note
    assert "suffix failed: broken. suffix failed under load: too slow." in table.note
    section = markdown_section(table)
    assert section.startswith("## What to serve\n\n- Serve it.\n\nTokens/s are")
    assert section.endswith("\n\n```bash\nmedusa-distill serve RUN_DIR  # 1 and 32 at a time\n```")
    assert what_to_serve_table(Report()).rows == []
    tie = choice(1, "plain", "ngram", is_beyond=False, margin=0.1)
    plain, *_, last = what_to_serve_table(report_of(tie)).rows
    assert (plain[3], last[3]) == ("100", "tie with ngram")
    disturbed = what_to_serve_table(report_of(found.vllm.choices[0]))
    assert disturbed.rows[-1][3:] == ("25.0% over ngram", "not judged")
    alone = what_to_serve_table(replace(found, run=None))  # heads that were measured without a run
    assert not alone.commands and "RUN_DIR" not in alone.note
    assert alone.rows == table.rows
