"""Whatever bytes a dump is made of, the readers end, and every row comes out once: kept or
refused.
"""

from __future__ import annotations

import json
import random
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import fuzz_seeds
from benchmarks.mutated_seeds import mutated_file
from pipeline.conversations import sources
from pipeline.conversations.conversation import Conversation, Reason, RejectedRow
from pipeline.conversations.sources import SourceReader
from pipeline.errors import DataError
from tests.conversations.test_readers import JSONL, ROWS

MANY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TEXTS = st.text() | st.sampled_from(["user", "gpt", "\0", "\ud800", "\ufeff", "../../x"])
KEYS = st.sampled_from(
    [
        "conversations",
        "messages",
        "data",
        "turns",
        "prompt",
        "system",
        "id",
        "from",
        "role",
        "value",
        "content",
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | TEXTS, inner, max_size=4),
    max_leaves=12,
)
NOISE = st.binary(max_size=12) | st.sampled_from(
    [b"\xff", b"\0", b'"', b"{", b"]", b"\\ud800", b"\\", b"\xed\xa0\x80"]
)


@dataclass(frozen=True)
class Source:
    path: Path
    hub: None = None
    split: str = "train"
    format: str = "auto"
    limit: None = None
    columns: dict[str, str] | None = None


def read(path: Path, form: str = "auto") -> tuple[list[Conversation | RejectedRow], str]:
    """The rows, and why the file was refused in the end, if it was."""
    rows: list[Conversation | RejectedRow] = []
    try:
        rows.extend(SourceReader(Source(path, format=form), "s", max_characters=1000))
    except DataError as error:
        return rows, str(error)
    return rows, ""


def in_order(rows: list[Conversation | RejectedRow]) -> bool:
    return [row.id for row in rows] == [f"s:{number}" for number in range(len(rows))]


@MANY
@given(
    values=st.lists(VALUES, min_size=1, max_size=8),
    form=st.sampled_from(["auto", "sharegpt", "ultrachat", "messages", "turns", "prompts"]),
    array=st.booleans(),
)
def test_rows_of_any_shape_come_out_once_each(values, form, array, tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [
        json.dumps(value) for value in [None, *values]
    ]  # what begins with a bracket is read as an array
    path.write_text(f"[{','.join(lines)}]" if array else "\n".join(lines))
    rows, _ = read(path, form)
    assert in_order(rows) and len(rows) == len(lines)


@MANY
@given(
    data=st.binary(max_size=400), suffix=st.sampled_from([".json", ".jsonl", ".txt", ".jsonl.gz"])
)
def test_any_bytes_are_rows_or_a_refusal_that_names_the_file(data, suffix, tmp_path):
    path = tmp_path / f"bytes{suffix}"
    path.write_bytes(data)
    rows, refusal = read(path)
    assert in_order(rows) and (not refusal or str(path) in refusal)
    assert rows or refusal


@MANY
@given(seed=st.integers(0, 2**32))
def test_a_mutated_dump_has_the_rows_that_its_bytes_say(seed, tmp_path):
    file = mutated_file(random.Random(seed), 12)
    outcomes = fuzz_seeds.prove(file, tmp_path)
    assert (
        outcomes.total() <= fuzz_seeds.expected(file).rows or fuzz_seeds.expected(file).breaks_off
    )


def test_a_table_whose_lines_end_as_no_reader_s_do_is_refused_by_name(tmp_path):
    path = tmp_path / "old.csv"
    path.write_bytes(b"prompt,note\rwhy?,a\rhow?,b\r")
    rows, refusal = read(path)
    assert (
        rows == []
        and str(path) in refusal
        and "names no columns" in refusal
        and "line feed" in refusal
    )


def test_a_line_that_is_cut_down_to_its_brace_costs_itself_alone(tmp_path):
    lines = [json.dumps({"prompt": f"why {number}?"}) for number in range(6)]
    for broken in (0, 3, 5):
        path = tmp_path / "cut.jsonl"
        path.write_text(
            "\n".join(["{" if number == broken else line for number, line in enumerate(lines)])
        )
        rows, refusal = read(path)
        assert [row.id for row in rows if isinstance(row, RejectedRow)] == [f"s:{broken}"] and len(
            rows
        ) == 6
        assert not refusal


@pytest.mark.slow
@pytest.mark.parametrize("array", [True, False], ids=["array", "lines"])
def test_a_row_that_is_nested_without_end_costs_itself_alone_and_little_memory(tmp_path, array):
    """The path to every level, kept as text, would be 20 GB of a row of 90 kB."""
    deep = '{"prompt": ' + "[" * 90_000 + "]" * 90_000 + "}"
    rows = ['{"prompt": "why?"}', deep, '{"prompt": "and?"}']
    path = tmp_path / "deep.json"
    path.write_text(f"[{','.join(rows)}]" if array else "\n".join(rows))
    tracemalloc.start()
    rows, refusal = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [type(row) for row in rows] == [Conversation, RejectedRow, Conversation] and not refusal
    assert rows[1].reason == Reason.BROKEN_JSON and peak < 50e6


def test_the_fuzzer_reads_as_many_rows_as_it_is_told(capsys):
    assert fuzz_seeds.main(["--rows", "200", "--seed", "1"]) == 0
    said = capsys.readouterr().out
    assert int(said.split()[0].replace(",", "")) >= 200 and "kept" in said


@pytest.mark.parametrize("defect", ["loses", "repeats", "crashes"])
def test_the_fuzzer_finds_a_reader_that_loses_repeats_or_crashes(
    monkeypatch, tmp_path, capsys, defect
):
    real = sources.read_row

    def crashing(row, id, *more):
        if id == "s:7":
            raise TypeError("unhashable")
        return real(row, id, *more)

    def losing(file):
        lines = list(lines_of(file))
        yield from lines[:-1] if defect == "loses" else [*lines, *lines[-1:]]

    lines_of = sources.lines
    name, broken = ("read_row", crashing) if defect == "crashes" else ("lines", losing)
    monkeypatch.setattr(sources, name, broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert fuzz_seeds.main(["--rows", "2000"]) == 1
    assert "kept as" in capsys.readouterr().out


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 400), NOISE), min_size=1, max_size=6))
def test_every_line_of_a_mangled_file_comes_out_exactly_once_and_storable(tmp_path, edits):
    data = bytearray(JSONL.encode())
    for place, bytes_ in edits:
        data[place : place + len(bytes_)] = bytes_
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'"sound"\n' + bytes(data))
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip(b"\xef\xbb\xbf \t\r\n")]
    outcomes, refusal = read(path)
    assert not refusal
    assert in_order(outcomes) and len(outcomes) == len(lines)
    for outcome in outcomes:
        if isinstance(outcome, RejectedRow):
            assert json.dumps(
                [outcome.detail, outcome.row], ensure_ascii=False, allow_nan=False
            ).encode()
        else:
            assert isinstance(outcome, Conversation)
            assert "".join(message.content for message in outcome.messages).encode()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 400), NOISE), min_size=1, max_size=4))
def test_a_mangled_array_is_read_or_refused_in_one_sentence(tmp_path, edits):
    data = bytearray(json.dumps(ROWS).encode())
    for place, bytes_ in edits:
        data[place : place + len(bytes_)] = bytes_
    path = tmp_path / "a.json"
    path.write_bytes(bytes(data))
    outcomes, refusal = read(path)
    assert in_order(outcomes) and "\n" not in refusal
