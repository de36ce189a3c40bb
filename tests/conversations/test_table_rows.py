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
from pipeline.conversations.conversation import Conversation, Message, Reason
from pipeline.conversations.sources import SourceReader
from pipeline.errors import ConfigError, DataError
from tests.conversations.test_sources import read, reasons

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
    assert [(row.id, row.source_id) for row in rows] == [(f"s:{n}", str(n)) for n in range(200)]
    assert [row.messages[0].content for row in rows] == [f"问题 {n}?" for n in range(200)]


def broken_texts(*texts: bytes) -> pa.Array:
    return pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())


@every_table
def test_a_row_that_cannot_be_read_costs_itself_alone(name, tmp_path, monkeypatch):
    """A text that is not UTF-8, one above the limit, and a time beyond Python's."""
    monkeypatch.setattr(text_rows, "MAX_ROW_BYTES", 100_000)
    prompts = broken_texts(b"why?", b"\xff\xfe", b"x" * 200_000, b"and?", b"who?")
    times = pa.array([0, 0, 0, 2**62, 0], pa.timestamp("ms"))
    write_table(pa.table({"prompt": prompts, "category": times}), tmp_path / name)
    expected = [None, Reason.UNDECODABLE, Reason.TOO_LONG, Reason.UNDECODABLE, None]
    assert reasons(read(tmp_path / name)) == expected


@every_table
def test_a_damaged_table_is_rows_or_an_error_that_names_it(name, tmp_path):
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


CSV = 'id,prompt,note\n1,why?,\n2,"and so\n""they"" say?",x\n3,one,too,many\n\n4,who?,\r\n'


@pytest.mark.parametrize(
    ("name", "delimiter"),
    [("a.csv", ","), ("a.csv", ";"), ("a.CSV", "\t"), ("a.tsv", "\t"), ("a.csv", "|")],
)
def test_a_csv_record_of_another_length_is_rejected_alone(name, delimiter, tmp_path):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + CSV.replace(",", delimiter).encode())
    rows = read(tmp_path / name)
    assert reasons(rows) == [None, None, Reason.BROKEN_ROW, None]
    assert rows[1].messages[0].content == 'and so\n"they" say?' and rows[3].source_id == "4"


BAD_RECORDS = {
    b"\xff\xfe": Reason.UNDECODABLE,
    b"x" * 2000: Reason.TOO_LONG,
    b'"' + b"y" * 2000 + b'"': Reason.TOO_LONG,
    b"ho\rw?": Reason.BROKEN_ROW,
}


@pytest.mark.parametrize(("record", "reason"), BAD_RECORDS.items(), ids=range(4))
def test_a_bad_record_costs_itself_alone(record, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(text_rows, "MAX_ROW_BYTES", 1000)
    (tmp_path / "a.csv").write_bytes(b"prompt\nwhy?\n" + record + b"\nand?\n")
    assert reasons(read(tmp_path / "a.csv")) == [None, reason, None]


def test_a_field_without_an_end_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(text_rows, "MAX_ROW_BYTES", 1000)
    (tmp_path / "b.csv").write_text('prompt\nwhy?\n"' + "never closed,\n" * 500)
    assert reasons(read(tmp_path / "b.csv"))[:2] == [None, Reason.TOO_LONG]


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


def test_a_list_of_turns_in_a_cell_is_read_as_json(tmp_path):
    with (tmp_path / "a.csv").open("w") as file:
        csv.writer(file).writerows([["messages"], [json.dumps(CHATS[0])], ["[broken"]])
    rows = read(tmp_path / "a.csv")
    assert rows[0].messages[0].content == "问题 0?" and rows[1].reason is Reason.BROKEN_JSON


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
