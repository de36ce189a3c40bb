"""Any bytes end as rows, each once, or as a refusal.

Damaged files of every kind (`mutated_seeds`) are read as in the seeds stage, and each row is stored
as there. The expected number of rows is counted from the bytes, without the readers; of a whole
table it is the number written.
"""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.artifacts.seed_rows import SEEDS, SeedRow
from pipeline.config import SeedSource
from pipeline.conversations import sources
from pipeline.conversations.conversation import Conversation, Reason, RejectedRow
from pipeline.conversations.sources import SourceReader
from pipeline.errors import DataError
from pipeline.storage.shards import quarantine_line
from tests.conversations.mutated_seeds import SeedFile, is_json, mutated_file
from tests.conversations.test_sources import read, reasons

MANY = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@dataclass(frozen=True)
class Expected:
    """The minimum number of rows of a file, and whether reading it may end with an error."""

    rows: int
    breaks_off: bool = False


def expected(file: SeedFile) -> Expected:
    """How many rows a file has: as it was written, or by its bytes."""
    name, data = file.name, file.data
    if not name.removesuffix(".gz").endswith((".jsonl", ".json", ".txt")):
        return Expected(file.num_rows or 0, breaks_off=file.num_rows is None)
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, ValueError, zlib.error):
            return Expected(0, breaks_off=True)
    text = data.decode("utf-8", "replace")
    lines = [line for line in (line.strip("\ufeff \t\r\n") for line in text.split("\n")) if line]
    if ".txt" in name or not text.lstrip("\ufeff").lstrip().startswith("["):
        whole = lines[:1] == ["{"] and is_json("\n".join(lines))
        return Expected(1 if whole else len(lines))
    try:
        return Expected(len(json.loads(text.lstrip("\ufeff"))), breaks_off=True)
    except (ValueError, RecursionError):
        return Expected(0, breaks_off=True)


def read_all(path: Path) -> tuple[list[Conversation | RejectedRow], DataError | None]:
    """A file's rows, and the error that reading it ended with, if any."""
    rows: list[Conversation | RejectedRow] = []
    try:
        rows.extend(SourceReader(SeedSource(path=path), "s", max_characters=100_000))
    except DataError as error:
        return rows, error
    return rows, None


def prove(file: SeedFile, directory: Path) -> Counter[str]:
    """Read one file and count its rows: kept, and rejected by reason.

    Raises:
        AssertionError: A row is missing, repeated, or cannot be stored.
    """
    path = directory / file.name
    path.write_bytes(file.data)
    wanted, (rows, refusal) = expected(file), read_all(path)
    assert [row.id for row in rows] == [f"s:{number}" for number in range(len(rows))], (
        "each row once, in order"
    )
    said = str(refusal or "")
    if refusal and "no conversation data" not in said:
        assert wanted.breaks_off and str(path) in said, f"refused without need: {said}"
    elif wanted.rows or not wanted.breaks_off:  # a malformed array may still be read, row by row
        assert len(rows) == wanted.rows, f"{len(rows)} rows came out of {wanted.rows}"
    said.encode()
    kept = [row for row in rows if isinstance(row, Conversation)]
    pa.RecordBatch.from_pylist([SeedRow(row, "train").stored() for row in kept], schema=SEEDS)
    refused = [row for row in rows if isinstance(row, RejectedRow)]
    for row in refused:
        assert json.loads(quarantine_line(row, "seeds").encode())["id"] == row.id
    return Counter({"kept": len(kept)}) + Counter(str(row.reason) for row in refused)


@MANY
@given(st.binary(max_size=400), st.sampled_from([".json", ".jsonl", ".txt", ".jsonl.gz"]))
def test_any_bytes_are_rows_or_a_refusal_that_names_the_file(tmp_path, data, suffix):
    path = tmp_path / f"bytes{suffix}"
    path.write_bytes(data)
    rows, refusal = read_all(path)
    assert [row.id for row in rows] == [f"s:{number}" for number in range(len(rows))]
    assert rows or str(path) in str(refusal)


@MANY
@given(st.integers(0, 2**32))
def test_a_mutated_dump_has_the_rows_that_its_bytes_say(tmp_path, seed):
    file = mutated_file(random.Random(seed), 12)
    outcomes = prove(file, tmp_path)
    wanted = expected(file)
    assert outcomes.total() <= wanted.rows or wanted.breaks_off


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


@pytest.mark.parametrize("defect", ["loses", "repeats", "crashes"])
def test_a_broken_reader_is_found(monkeypatch, tmp_path, defect):
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
    with pytest.raises((AssertionError, TypeError)):
        for seed in range(40):
            prove(mutated_file(random.Random(seed)), tmp_path)
