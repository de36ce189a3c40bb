"""The table and sentences of what to serve, with the command for it."""

from __future__ import annotations

from pipeline.artifacts.check_result import (
    CheckFigures,
    GreedyMatch,
    LoadRow,
    ServedMethod,
    ServingChoice,
    VllmFigures,
)
from pipeline.report.report import Report
from pipeline.report.what_to_serve import serving_advice, what_to_serve_table

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
FIVE = {"method": "eagle", "num_speculative_tokens": 5}


def choice(requests: int, method: str, speedup: float, second: str, margin: float, beyond=None):
    return ServingChoice(
        requests=requests,
        method=method,
        speedup=speedup,
        second=second,
        margin=margin,
        is_beyond_scatter=beyond,
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
    )
    return Report(target="my/model", check=CheckFigures(vllm=vllm, passed=True, failures=[]))


def test_each_load_has_its_verdict_and_command():
    one = choice(1, "heads", 1.63, "ngram", 0.358, True)
    many = choice(32, "plain", 1.0, "ngram", 0.02, False)
    first, command, second, plain = serving_advice(report_of(one, many))
    assert first == (
        "1 request at once: serve heads, 1.63x plain vLLM and 36% faster than ngram (more than"
        " repeats scatter)."
    )
    assert command == "Command: medusa-distill serve RUN_DIR"
    assert second == (
        "32 requests at once: serve none, plain vLLM is 2% faster than ngram (no more than repeats"
        " scatter)."
    )
    assert plain == "Command: vllm serve my/model"


def test_loads_with_the_same_answer_are_one_sentence():
    found = report_of(choice(1, "ngram", 1.1, "plain", 0.1), choice(4, "ngram", 4.4, "heads", 0.3))
    sentence, command = serving_advice(found)
    assert sentence == (
        "1 to 4 requests at once: serve ngram, 1.10x to 4.40x plain vLLM and at least 10% faster"
        " than plain (one repeat: its scatter is unknown)."
    )
    assert command.startswith('Command: vllm serve my/model --speculative-config \'{"method"')


def test_other_numbers_of_draft_tokens_become_the_export_s():
    _, command = serving_advice(report_of(choice(1, "heads, 5", 2.0, "heads", 0.1)))
    assert command == "Command: medusa-distill run CONFIG calibrate.draft_tokens=5"


def test_the_fastest_of_each_load_is_marked():
    found = report_of(
        choice(1, "heads", 1.5, "ngram", 0.1), choice(32, "plain", 1, "heads", 0.1), failed="broken"
    )
    table = what_to_serve_table(found)
    rows = {row[0]: row for row in table.rows}
    assert list(rows) == ["plain", "heads", "heads, 5", "ngram"]
    assert [cell.endswith("best") for cell in rows["plain"][3:]] == [False, True]
    assert [cell.endswith("best") for cell in rows["heads"][3:]] == [True, False]
    assert not any("best" in cell for cell in rows["ngram"])
    assert "suffix failed: broken." in table.note
    assert what_to_serve_table(Report()).rows == []
