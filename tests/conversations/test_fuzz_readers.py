"""Any bytes end as rows, each once, or as a refusal."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import fuzz_seeds
from benchmarks.mutated_seeds import mutated_file
from pipeline.conversations import sources
from pipeline.conversations.conversation import Reason
from tests.conversations.test_sources import read, reasons

MANY = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@MANY
@given(st.binary(max_size=400), st.sampled_from([".json", ".jsonl", ".txt", ".jsonl.gz"]))
def test_any_bytes_are_rows_or_a_refusal_that_names_the_file(tmp_path, data, suffix):
    path = tmp_path / f"bytes{suffix}"
    path.write_bytes(data)
    rows, refusal = fuzz_seeds.read_all(path)
    assert [row.id for row in rows] == [f"s:{number}" for number in range(len(rows))]
    assert rows or str(path) in str(refusal)


@MANY
@given(st.integers(0, 2**32))
def test_a_mutated_dump_has_the_rows_that_its_bytes_say(tmp_path, seed):
    file = mutated_file(random.Random(seed), 12)
    outcomes = fuzz_seeds.prove(file, tmp_path)
    expected = fuzz_seeds.expected(file)
    assert outcomes.total() <= expected.rows or expected.breaks_off


@pytest.mark.slow
@pytest.mark.parametrize("array", [True, False], ids=["array", "lines"])
def test_a_deeply_nested_row_costs_itself_alone_and_little_memory(tmp_path, array):
    """The path to every level, kept as text, would be 20 GB of a row of 90 kB."""
    deep = '{"prompt": ' + "[" * 90_000 + "]" * 90_000 + "}"
    lines = ['"why?"', deep, '"and?"']
    path = tmp_path / "deep.json"
    path.write_text(f"[{','.join(lines)}]" if array else "\n".join(lines))
    tracemalloc.start()
    rows = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reasons(rows) == [None, Reason.BROKEN_JSON, None] and peak < 50e6


def test_the_fuzzer_reads_as_many_rows_as_it_is_told(capsys):
    assert fuzz_seeds.main(["--rows", "200", "--seed", "1"]) == 0
    assert int(capsys.readouterr().out.split()[0].replace(",", "")) >= 200


@pytest.mark.parametrize("defect", ["loses", "repeats", "crashes"])
def test_the_fuzzer_finds_a_broken_reader(monkeypatch, tmp_path, capsys, defect):
    read_row, lines = sources.read_row, sources.lines

    def broken_row(row, id, settings):
        if defect == "crashes" and id == "s:7":
            raise TypeError("unhashable")
        return read_row(row, id, settings)

    def broken_lines(file):
        found = list(lines(file))
        if defect == "loses":
            found.pop()
        elif defect == "repeats":
            found += found[-1:]
        yield from found

    monkeypatch.setattr(sources, "read_row", broken_row)
    monkeypatch.setattr(sources, "lines", broken_lines)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert fuzz_seeds.main(["--rows", "2000"]) == 1
    assert "kept as" in capsys.readouterr().out
