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
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.artifacts.seed_rows import SEEDS, SeedRow
from pipeline.config import SeedSource
from pipeline.conversations.conversation import Conversation, RejectedRow
from pipeline.conversations.sources import SourceReader
from pipeline.errors import DataError
from pipeline.storage.shards import quarantine_line
from tests.conversations.mutated_seeds import SeedFile, is_json, mutated_file
from tests.conversations.test_sources import outcomes, read, written

MANY = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def num_rows(file: SeedFile) -> int | None:
    """The number of rows of a file, as written or by its bytes; None if unknown."""
    if not file.name.removesuffix(".gz").endswith((".jsonl", ".json", ".txt")):
        return file.num_rows
    data = file.data
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            return None
    text = data.decode("utf-8", "replace").lstrip("\ufeff")
    if ".txt" not in file.name and text.lstrip().startswith("["):
        return len(json.loads(text)) if is_json(text) else None
    lines = [line for line in text.split("\n") if line.strip("\ufeff \t\r")]
    whole = ".txt" not in file.name and lines[0].strip() == "{" and is_json(text)
    return 1 if whole else len(lines)


@MANY
@given(st.integers(0, 2**32))
def test_a_mutated_dump_has_the_rows_that_its_bytes_say(tmp_path, seed):
    """Each once, in order, and storable."""
    file = mutated_file(random.Random(seed))
    rows, refusal = read_all(written(tmp_path / file.name, file.data))
    wanted = num_rows(file)
    assert [row.id for row in rows] == [f"s:{number}" for number in range(len(rows))]
    assert wanted is None or len(rows) == wanted
    assert refusal is None or str(tmp_path / file.name) in str(refusal)
    assert wanted is None or refusal is None or "no conversation data" in str(refusal)
    kept = [SeedRow(row, "train").stored() for row in rows if isinstance(row, Conversation)]
    pa.RecordBatch.from_pylist(kept, schema=SEEDS)
    for row in rows:
        if isinstance(row, RejectedRow):
            assert json.loads(quarantine_line(row, "seeds").encode())["id"] == row.id


def read_all(path: Path) -> tuple[list[Conversation | RejectedRow], DataError | None]:
    """A file's rows, and the error that reading it ended with, if any."""
    rows: list[Conversation | RejectedRow] = []
    try:
        rows.extend(SourceReader(SeedSource(path=path), "s", max_characters=100_000))
    except DataError as error:
        return rows, error
    return rows, None


@MANY
@given(st.binary(max_size=400), st.sampled_from([".json", ".jsonl", ".txt", ".jsonl.gz"]))
def test_any_bytes_give_rows_or_name_the_refused_file(tmp_path, data, suffix):
    path = written(tmp_path / f"bytes{suffix}", data)
    rows, refusal = read_all(path)
    assert [row.id for row in rows] == [f"s:{number}" for number in range(len(rows))]
    assert rows or str(path) in str(refusal)


@pytest.mark.slow
@pytest.mark.parametrize("array", [True, False], ids=["array", "lines"])
def test_a_deeply_nested_row_costs_itself_alone_and_little_memory(tmp_path, array):
    """The path to every level, kept as text, would be 20 GB of a row of 90 kB."""
    deep = '{"prompt": ' + "[" * 90_000 + "]" * 90_000 + "}"
    lines = ['"why?"', deep, '"and?"']
    text = f"[{','.join(lines)}]" if array else "\n".join(lines)
    path = written(tmp_path / "deep.json", text)
    tracemalloc.start()
    rows = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcomes(rows) == "why? | broken-json | and?" and peak < 50e6
