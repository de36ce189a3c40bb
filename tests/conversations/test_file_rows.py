"""Rows of seed files of every kind: each is read once, a bad row is rejected alone."""

from __future__ import annotations

import gzip
import io
import json
import random
from array import array

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline.artifacts.seed_rows import SEEDS, SeedRow
from pipeline.config import SeedSource
from pipeline.conversations import file_rows, repair
from pipeline.conversations.conversation import Conversation
from pipeline.conversations.sources import SourceReader
from pipeline.errors import DataError
from pipeline.storage.shards import quarantine_line
from tests.conversations.test_sources import outcomes, read, written

TEXTS = [f"问题 {n}?" for n in range(200)]
EXPECTED = " | ".join(TEXTS)
ROWS = [{"id": n, "messages": [{"role": "user", "content": TEXTS[n]}]} for n in range(200)]
JSONL = "\n".join(map(json.dumps, ROWS))


def table_file(table: pa.Table, kind: str) -> bytes:
    sink = io.BytesIO()
    if kind == "feather":
        feather.write_feather(table, sink)
    elif kind == "arrow":
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=30)
    else:
        pq.write_table(table, sink, row_group_size=70)
    return sink.getvalue()


TABLE = pa.Table.from_pylist(ROWS).append_column("noise", [[b"\xff" * 100] * 200])
FILES = {
    "a.jsonl": JSONL.encode(),
    "byte-order-mark.json": b"\xef\xbb\xbf \n" + json.dumps(ROWS).encode(),
    "utf-16.jsonl": JSONL.encode("utf-16"),
    "utf-16-big-endian.json": ("\ufeff" + json.dumps(ROWS)).encode("utf-16-be"),
    "utf-16.csv.gz": gzip.compress("\n".join(["prompt", *TEXTS]).encode("utf-16")),
    "packed-called.jsonl": gzip.compress(json.dumps(ROWS).encode()),
    "a.csv": "\n".join(["id,prompt", *(f"{n},{text}" for n, text in enumerate(TEXTS))]).encode(),
    "table-called.jsonl": table_file(TABLE, "parquet"),
    "a.feather": table_file(TABLE, "feather"),
    "a.arrow": table_file(TABLE, "arrow"),
    "\udcff.arrow": table_file(TABLE, "arrow"),
}
CALLED = """[
    {"prompt": "Sunny?", "id": null, "tools": [
        {"name": "weather", "parameters": {"city": {"type": "string"}, "tags": ["a", null]}}]},
    {"prompt": "Late?", "id": "7", "tools": [
        {"name": "clock", "parameters": {"zone": {"type": "string"}}}]}
]"""


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(repair, "MAX_CHARACTERS", 1010)


every_table = pytest.mark.parametrize("kind", ["parquet", "feather", "arrow"])


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_its_rows_in_order(name, tmp_path):
    rows = read(written(tmp_path / name, FILES[name]))
    assert outcomes(rows) == EXPECTED
    assert [row.id for row in rows] == [f"s:{n}" for n in range(200)]


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(FILES)), seed=st.integers(0, 2**32))
@example(name="a.jsonl", seed=36)
def test_a_damaged_file_gives_storable_rows_or_a_named_error(name, seed, tmp_path):
    rng = random.Random(seed)
    data = bytearray(FILES[name])
    for _ in range(rng.choice((1, 2, 8))):
        data[rng.randrange(len(data))] = rng.choice((rng.randrange(256), *b'"{]\\\n\0,'))
    if rng.random() < 0.2:
        del data[rng.randrange(len(data)) :]
    path = written(tmp_path / name, bytes(data))
    rows = []
    try:
        rows.extend(SourceReader(SeedSource(path=path), "s"))
    except DataError as error:
        assert str(path) in str(error)
    assert [row.id for row in rows] == [f"s:{number}" for number in range(len(rows))]
    if name == "a.jsonl":
        text = data.decode("utf-8", "replace").removeprefix("\ufeff")
        lines = io.StringIO(text, newline=None)  # `splitlines` also splits at U+001D and others
        assert len(rows) == len([line for line in lines if line.strip(file_rows.BLANK)])
    kept = [SeedRow(row, "train").stored() for row in rows if isinstance(row, Conversation)]
    pa.RecordBatch.from_pylist(kept, schema=SEEDS)
    for row in rows:
        if not isinstance(row, Conversation):
            assert json.loads(quarantine_line(row, "seeds").encode())["id"] == row.id


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.jsonl", b'"a?"\n{"conversations": [\n"b?"', "a? | broken-json | b?"),
        ("a.jsonl", b'"a?"\n%s\n"b?"' % (b"[" * 100_000), "a? | broken-json | b?"),
        ("a.jsonl", b'"a?"\n{"prompt": "\xff"}\n"b?"', "a? | undecodable | b?"),
        ("a.json", b'["\\ud83d\\ude00?", "b\\ud83d"]', "😀? | undecodable"),
        (
            "a.json",
            b'["a?", "sec\xe6\x9dond", 1e400, "c?"]',
            "a? | undecodable | unknown-format | c?",
        ),
        ("a.txt", b"\xff\xfea\0\n\0\x41\xd8\n\0c\0\n\0d", "a | undecodable | c | undecodable"),
        ("a.csv", b"\xef\xbb\xbfid,prompt\n1,a?\n\n2,b?\r\n", "a? | b?"),
        ("a.CSV", b"id;prompt\n1;a,b?", "a,b?"),
        ("a.csv", b'prompt,id\n"a, so\n""they"" say?",1', 'a, so\n"they" say?'),
        ("a.csv", b"prompt,id\na?,1\none,too,many\none\nb?,2", "a? | broken-row | broken-row | b?"),
        ("a.csv", b'prompt\na?\n"%s\nb?' % (b"never closed\n" * 80), "a? | too-long"),
        ("a.csv", b'turns\n"[""a?""]"\n[broken', "a? | broken-json"),
    ],
)
def test_a_bad_row_costs_itself_alone(name, data, expected, tmp_path):
    assert outcomes(read(written(tmp_path / name, data))) == expected


@pytest.mark.parametrize("chunk", [1, 7, 1 << 16])
def test_an_array_is_the_same_in_chunks_of_any_size(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(file_rows, "CHUNK", chunk)
    items = ['a "quoted, [one]', "back\\slash\\", "{", "月" * 9000, 12345, {"a": []}]
    for indent in (None, 2):
        path = written(tmp_path / "rows.json", json.dumps(items, indent=indent))
        with path.open("rb") as file:
            assert list(file_rows.json_rows(file, path)) == items


@pytest.mark.parametrize("text", ['["a?", {"pro', '["a?",, "b?"]', '["a?"] ]'])
def test_a_malformed_array_is_an_error(text, tmp_path):
    with pytest.raises(DataError, match=r"after \d rows"):
        read(written(tmp_path / "a.json", text))


def test_a_line_above_the_limit_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(file_rows, "MAX_ROW", 1500)
    rows = read(written(tmp_path / "a.txt", f"why?\n{'x' * 2900}\nand?"))
    assert outcomes(rows) == "why? | too-long | too-long | and?"


def test_a_header_that_never_ends_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(file_rows, "MAX_ROW", 1500)
    with pytest.raises(DataError, match="header"):
        read(written(tmp_path / "a.csv", '"prompt\n' + "why?\n" * 500))


@pytest.mark.parametrize("cut", [15, -4])
def test_a_truncated_gzip_file_is_an_error(cut, tmp_path):
    with pytest.raises(DataError, match="damaged"):
        read(written(tmp_path / "a.jsonl.gz", gzip.compress(JSONL.encode())[:cut]))


@every_table
def test_a_table_gives_the_functions_that_its_rows_were_made_of(kind, tmp_path):
    """Columns align structs: each function has the others' parameters, as nulls."""
    rows = read(written(tmp_path / "a.json", CALLED))
    table = pa.Table.from_pylist(json.loads(CALLED))
    assert read(written(tmp_path / f"a.{kind}", table_file(table, kind))) == rows
    assert "zone" not in rows[0].tools and "null" in rows[0].tools


def broken_texts(*texts: bytes) -> pa.Array:
    return pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())


@every_table
def test_a_table_s_unreadable_row_costs_itself_alone(kind, tmp_path):
    """Read a text that is not UTF-8, and a time beyond Python's."""
    prompts = broken_texts(b"why?", b"\xff\xfe", b"x" * 2000, b"and?", b"who?")
    times = pa.array([0, 0, 0, 2**62, 0], pa.timestamp("ms"))
    table = pa.table({"prompt": prompts, "category": times})
    rows = read(written(tmp_path / f"a.{kind}", table_file(table, kind)))
    assert outcomes(rows) == "why? | undecodable | too-long | undecodable | who?"


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_offsets_beyond_the_file_s_memory_are_never_read(new, tmp_path):
    """Arrow names the first fault of a batch alone; a later one would end the process."""
    texts = broken_texts(b"\xff", b"why?", b"how?")
    offsets = pa.py_buffer(array("i", [0, 2**30, 2, 2]).tobytes())
    inner = pa.array(["a", "b"])
    lists = pa.Array.from_buffers(pa.list_(pa.string()), 3, [None, offsets], children=[inner])
    batch = pa.RecordBatch.from_arrays([texts, lists], ["prompt", "turns"])
    path = tmp_path / "a.arrow"
    with new(str(path), batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(DataError, match=r"a\.arrow"):
        read(path)
