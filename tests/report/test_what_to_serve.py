"""The choice of what to serve: the fastest method at each load, its margin, and its command."""

from __future__ import annotations

import pytest

from pipeline.artifacts.check_result import (
    CheckFigures,
    GreedyMatch,
    LoadRow,
    ServedMethod,
    Studies,
    Throughput,
    VllmFigures,
)
from pipeline.report.report import Report
from pipeline.report.what_to_serve import serving_advice, serving_choices, what_to_serve_table

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def at(requests: int, speed: float, low: float | None = None, high: float | None = None):
    return Throughput(requests=requests, tokens_per_second=speed, lowest=low, highest=high)


def report_of(*methods: ServedMethod, load: list[LoadRow] | None = None) -> Report:
    vllm = VllmFigures(
        acceleration_rate=2.0,
        greedy_match=GreedyMatch(2, 2, 0),
        methods=list(methods),
        studies=Studies(load=load),
    )
    return Report(target="my/model", check=CheckFigures(vllm=vllm, passed=True, failures=[]))


def three(plain, heads, ngram, **more) -> Report:
    return report_of(
        ServedMethod(name="plain", throughput=plain),
        ServedMethod(name="heads", draft_tokens=5, throughput=heads),
        ServedMethod(name="ngram", draft_tokens=4, speculative_config=NGRAM, throughput=ngram),
        **more,
    )


def test_the_fastest_method_is_named_at_each_load():
    report = three(
        [at(1, 100, 90, 110), at(32, 1000, 950, 1050)],
        [at(1, 163, 160, 170), at(32, 900, 880, 950)],
        [at(1, 120, 110, 130), at(32, 980, 970, 990)],
    )
    one, many = serving_choices(report)
    assert (one.method, one.next_method, one.is_beyond_scatter) == ("heads", "ngram", True)
    assert one.margin == pytest.approx(163 / 120 - 1)
    assert (many.method, many.next_method, many.is_beyond_scatter) == ("plain", "ngram", False)
    first, command, second, plain = serving_advice(report)
    assert first.startswith("1 request at once: serve heads, 1.63x plain vLLM and 36% faster")
    assert "more than repeats scatter" in first and "no more than" not in first
    assert command == "Command: medusa-distill serve RUN_DIR"
    assert second.startswith("32 requests at once: serve none, plain vLLM is 2% faster than ngram")
    assert "no more than repeats scatter" in second and plain == "Command: vllm serve my/model"
    rows = {row[0]: row[1:] for row in what_to_serve_table(report).rows}
    assert rows["heads"][-2].endswith("best") and rows["plain"][-1].endswith("best")
    assert sum(cell.endswith("best") for row in rows.values() for cell in row) == 2


def test_loads_with_the_same_answer_are_one_sentence():
    loads = (1, 4)
    report = three(
        [at(load, 100) for load in loads],
        [at(load, 90) for load in loads],
        [at(load, 110 * load) for load in loads],
    )
    sentence, command = serving_advice(report)
    assert sentence.startswith("1 to 4 requests at once: serve ngram, 1.10x to 4.40x plain vLLM")
    assert "at least 10% faster than plain" in sentence and "scatter is unknown" in sentence
    assert command.startswith('Command: vllm serve my/model --speculative-config \'{"method"')


def test_requests_out_of_time_do_not_count():
    """The heads are faster at both loads, and late in half of the requests at the second."""
    rows = []
    for requests, share in ((1, 1.0), (2, 0.5)):
        rows.append(
            LoadRow(
                requests=requests,
                tokens_per_second=150.0,
                within_slo=share,
                baseline_tokens_per_second=100.0,
                baseline_within_slo=1.0,
                range=[140.0, 160.0],
                baseline_range=[90.0, 110.0],
            )
        )
    report = three([at(1, 1)], [at(1, 2)], [at(1, 3)], load=rows)
    first, second = serving_choices(report)
    assert (first.method, first.is_beyond_scatter) == ("heads", True)
    assert (second.method, second.next_method) == ("plain", "heads")
    assert second.margin == pytest.approx(100 / 75 - 1)
    table = what_to_serve_table(report)
    assert [row[0] for row in table.rows] == ["plain", "heads"], "ngram was not under load"


def test_a_failed_method_is_named_with_its_reason():
    failed = ServedMethod(name="suffix", failed="no arctic")
    report = report_of(ServedMethod(name="plain", throughput=[at(1, 5)]), failed)
    assert serving_choices(report) == [] and serving_advice(report) == []
    assert "suffix failed: no arctic." in what_to_serve_table(report).note
    assert what_to_serve_table(Report()).rows == []
