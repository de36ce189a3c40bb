"""CSV, TSV, Parquet, Arrow and Hub tables: each row once, a bad one alone, in little memory."""

from __future__ import annotations

import csv
import datetime
import json
import random
from array import array

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from pipeline.config import SeedSource
from pipeline.conversations import text_rows
from pipeline.conversations.conversation import Conversation, Message
from pipeline.conversations.sources import SourceReader
from pipeline.errors import ConfigError, DataError
from tests.conversations.test_sources import outcomes, read

CHATS = [
    [{"role": "user", "content": f"问题 {n}?"}, {"role": "assistant", "content": "So."}]
    for n in range(200)
]
TABLE = pa.table({"messages": CHATS, "id": list(range(200)), "noise": [b"\xff" * 100] * 200})


def write_table(table: pa.Table, path) -> None:
    if path.suffix == ".feather":
        feather.write_feather(table, path)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=30)
    else:
        pq.write_table(table, path, row_group_size=70)


every_table = pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.arrow"])


@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.arrow", "b.jsonl"])
def test_a_table_s_rows_come_out_in_order(name, tmp_path):
    """Also from a name that is not UTF-8, or that another kind of file has."""
    write_table(TABLE, tmp_path / name)
    rows = read((tmp_path / name).rename(tmp_path / f"\udcff{name}"))
    assert outcomes(rows) == " | ".join(f"问题 {n}?" for n in range(200))
    assert [row.source_id for row in rows] == [str(n) for n in range(200)]


def broken_texts(*texts: bytes) -> pa.Array:
    return pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())


@every_table
def test_a_row_that_cannot_be_read_costs_itself_alone(name, tmp_path, monkeypatch):
    """A text that is not UTF-8, one above the limit, and a time beyond Python's."""
    monkeypatch.setattr(text_rows, "MAX_ROW_BYTES", 100_000)
    prompts = broken_texts(b"why?", b"\xff\xfe", b"x" * 200_000, b"and?", b"who?")
    times = pa.array([0, 0, 0, 2**62, 0], pa.timestamp("ms"))
    write_table(pa.table({"prompt": prompts, "category": times}), tmp_path / name)
    expected = "why? | undecodable | too-long | undecodable | who?"
    assert outcomes(read(tmp_path / name)) == expected


@every_table
def test_a_damaged_table_gives_rows_or_a_named_error(name, tmp_path):
    path = tmp_path / name
    write_table(TABLE, path)
    whole, rng = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.2:
            data = data[: rng.randrange(len(data))]
        path.write_bytes(data)
        try:
            read(path)
        except DataError as error:
            refused += 1
            assert name in str(error)
    assert refused > 10


@pytest.mark.parametrize("name", ["a.feather", "a.arrow"])
def test_offsets_beyond_the_file_s_memory_are_never_read(name, tmp_path):
    """Arrow names the first fault of a batch alone; a later one would end the process."""
    texts = broken_texts(b"\xff", b"why?")
    offsets = pa.py_buffer(array("i", [0, 2**30, 2]).tobytes())
    inner = pa.array(["a", "b"])
    lists = pa.Array.from_buffers(pa.list_(pa.string()), 2, [None, offsets], children=[inner])
    batch = pa.RecordBatch.from_arrays([texts, lists], ["prompt", "turns"])
    new = pa.ipc.new_file if name == "a.feather" else pa.ipc.new_stream
    with new(str(tmp_path / name), batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(DataError, match=name):
        read(tmp_path / name)


def test_a_table_of_more_bytes_than_the_limit_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    write_table(pa.table({"prompt": ["x" * 1000] * 1000}), path)
    with pytest.raises(DataError, match=r"seeds\.max_file_gb"):
        list(SourceReader(SeedSource(path=path), "s", 10_000, max_file_bytes=500_000))


def test_a_table_is_streamed_however_large_its_row_groups(tmp_path):
    """One row group of 24 MB; columns that no form reads are not read at all."""
    path = tmp_path / "a.parquet"
    prompts = [f"{n} " + "x" * 1000 for n in range(12_000)]
    many = pa.table({"prompt": prompts, "noise": [b"y" * 1000] * 12_000})
    pq.write_table(many, path, row_group_size=12_000)
    del many
    before = most = pa.total_allocated_bytes()
    for number, row in enumerate(SourceReader(SeedSource(path=path), "s", 10_000)):
        most = max(most, pa.total_allocated_bytes())
        assert row.id == f"s:{number}"
    assert number == 11_999 and most - before < 6e6


def test_a_table_without_a_known_column_says_which_it_has(tmp_path):
    table = pa.table({"question": ["why?"], "when": [datetime.date(2024, 1, 1)]})
    write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="`question`, `when`"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.csv", b"\xef\xbb\xbfid,prompt\n1,a?\n\n2,b?\r\n", "a? | b?"),
        ("a.CSV", b"id;prompt\n1;a,b?", "a,b?"),
        ("a.csv", b"id\tprompt\n1\ta,b?", "a,b?"),
        ("a.csv", b"id|prompt\n1|a,b?", "a,b?"),
        ("a.tsv", b"prompt\tid,x,y\na?\t1", "a?"),
        ("a.csv", b'prompt,id\n"a, so\n""they"" say?",1', 'a, so\n"they" say?'),
        ("a.csv", b"prompt,id\na?,1\none,too,many\none\nb?,2", "a? | broken-row | broken-row | b?"),
        ("a.csv", b"prompt\na?\nho\rw?\nb?", "a? | broken-row | b?"),
        ("a.csv", b"prompt\na?\n\xff\xfe\nb?", "a? | undecodable | b?"),
        ("a.csv", b"prompt\na?\n%s\nb?" % (b"x" * 2000), "a? | too-long | b?"),
        ("a.csv", b'prompt\na?\n"%s"\nb?' % (b"x" * 2000), "a? | too-long | b?"),
        ("a.csv", b'prompt\na?\n"%s' % (b"never closed\n" * 78), "a? | too-long | never closed"),
        ("a.csv", b'turns\n"[""a?""]"\n[broken', "a? | broken-json"),
    ],
)
def test_a_bad_record_costs_itself_alone(name, data, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(text_rows, "MAX_ROW_BYTES", 1000)
    (tmp_path / name).write_bytes(data)
    assert outcomes(read(tmp_path / name)) == expected


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ("why is the sky blue?\nwho are you?\n", r"`why is the sky blue\?`.*first line"),
        ("prompt,note\rwhy?,a\rhow?,b\r", "line feed"),
    ],
)
def test_a_csv_without_a_header_is_refused_by_name(data, found, tmp_path):
    (tmp_path / "a.csv").write_text(data, newline="")
    with pytest.raises(DataError, match=found):
        read(tmp_path / "a.csv")


# Columns of other names.

ROWS = [{"q": f"问题 {n}?", "a": "So.", "number": n, "prompt": "not this one"} for n in range(5)]
COLUMNS = {"prompt": "q", "response": "a", "id": "number"}


def write_rows(path) -> None:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)))
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w") as file:
            delimiter = "\t" if path.suffix == ".tsv" else ","
            writer = csv.DictWriter(file, list(ROWS[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        write_table(pa.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv", "a.parquet", "a.arrow", "hub"])
def test_columns_of_other_names_are_read_or_missed_by_name(name, tmp_path):
    path = tmp_path / name if name != "hub" else tmp_path / "train.parquet"
    write_rows(path)
    source = {"path": path} if name != "hub" else {"hub": str(tmp_path)}
    rows = list(SourceReader(SeedSource(**source, columns=COLUMNS), "s", 1000))
    said = (Message("user", "问题 3?"), Message("assistant", "So."))
    assert len(rows) == 5 and rows[3] == Conversation("s:3", said, "3")
    # Rows of JSON may differ, a table's columns may not.
    error = DataError if name == "a.jsonl" else ConfigError
    with pytest.raises(error, match=r"`question`.*`q`, `a`, `number`"):
        list(SourceReader(SeedSource(**source, columns={"prompt": "question"}), "s", 1000))
