"""Load levels of vLLM's server, in turns."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from pipeline.errors import EnvironmentFault
from pipeline.targets import vllm_load
from pipeline.targets.vllm_load import LoadFigures, LoadTask, serve_under_load


def test_loads_take_turns_and_the_fastest_pass_counts(random_target, monkeypatch):
    """The first pass is the fastest at both loads."""
    asked, reports = [], []

    async def benchmark(address, requests, level, eos):
        asked.append((level, len(requests)))
        turn = (len(asked) - 1) // 2
        return LoadFigures(level, (2.0, 90.0, 2.0 + level)[turn], 9, [], [], None)

    monkeypatch.setattr(vllm_load, "import_vllm", lambda: None)
    monkeypatch.setattr(vllm_load, "server_of", lambda *_: contextlib.nullcontext(""))
    monkeypatch.setattr(vllm_load, "_benchmark_server", benchmark)
    task = LoadTask(random_target, [[1, 2], [3]], 9, repeats=3, levels=[1, 4])
    passes = vllm_load.measure_server(task, lambda **progress: reports.append(progress))
    rows = vllm_load.fastest_passes(passes)
    assert asked == [(1, 2), (4, 8)] * 3
    assert [(row.requests, row.seconds) for row in rows] == [(1, 2.0), (4, 2.0)]
    assert rows[0].speeds == [9 / 2, 9 / 90, 9 / 3]
    assert [each["done"] for each in reports[1:]] == [0, 1, 2, 3, 4, 5]


def test_an_optional_server_that_fails_ends_no_other(random_target, monkeypatch):
    def in_own_process(function, task, on_report):
        started.append(task.name)
        if task.name == "ngram":
            raise EnvironmentFault("It died.", "", "")
        return [LoadFigures(1, float(len(started)), 9, [], [], None)]

    started: list[str] = []

    monkeypatch.setattr(vllm_load, "in_own_process", in_own_process)
    plain = LoadTask(random_target, [[1]], 9, levels=[1])
    ngram = replace(plain, name="ngram", optional=True)
    heads = replace(plain, name="heads")
    (first,), reason, (last,) = serve_under_load([plain, ngram, heads])
    assert reason == "It died"
    assert started == [plain.name, "ngram", "heads", plain.name, "heads"], "in two rounds"
    assert (first.seconds, first.speeds) == (1.0, [9 / 1, 9 / 4])
    assert (last.seconds, last.speeds) == (3.0, [9 / 3, 9 / 5])
    with pytest.raises(EnvironmentFault):
        serve_under_load([replace(ngram, optional=False)])
