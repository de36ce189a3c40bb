"""CSV, TSV, Parquet and Arrow files: each row once, a damaged one alone, and little memory."""

from __future__ import annotations

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
from pipeline.conversations.conversation import Conversation, Reason, RejectedRow
from pipeline.conversations.sources import SourceReader
from pipeline.errors import DataError

CHATS = [
    [{"role": "user", "content": f"问题 {n}?"}, {"role": "assistant", "content": "So."}]
    for n in range(200)
]
TABLE = pa.table({"messages": CHATS, "id": list(range(200)), "noise": [b"\xff" * 100] * 200})


def read(path, **settings) -> list[Conversation | RejectedRow]:
    return list(SourceReader(SeedSource(path=path, **settings), "s", max_characters=1000))


def stream(table: pa.Table, path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=30)


WRITERS = {
    "a.parquet": lambda table, path: pq.write_table(table, path, row_group_size=70),
    "a.feather": lambda table, path: feather.write_feather(table, path),
    "a.arrow": stream,
    "called.jsonl": lambda table, path: pq.write_table(table, path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_table_s_rows_come_out_in_order_whatever_its_container(name, tmp_path):
    WRITERS[name](TABLE, tmp_path / name)
    rows = read(tmp_path / name)
    assert [(row.id, row.source_id) for row in rows] == [(f"s:{n}", str(n)) for n in range(200)]
    assert [row.messages[0].content for row in rows] == [f"问题 {n}?" for n in range(200)]


@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.arrow"])
def test_a_table_whose_name_is_no_utf_8_is_read(name, tmp_path):
    WRITERS[name](TABLE, tmp_path / name)
    odd = (tmp_path / name).rename(tmp_path / name.replace("a", "\udcff", 1))
    assert len(read(odd)) == 200


@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.arrow"])
def test_a_row_of_a_table_that_cannot_be_read_costs_itself_alone(name, tmp_path, monkeypatch):
    """A text that is not UTF-8, one above the limit, and a time beyond Python's."""
    monkeypatch.setattr(text_rows, "MAX_ROW_BYTES", 100_000)
    texts = [b"why?", b"\xff\xfe", b"x" * 200_000, b"and?", b"who?"]
    prompts = pa.Array.from_buffers(pa.string(), 5, pa.array(texts, pa.binary()).buffers())
    times = pa.array([0, 0, 0, 2**62, 0], pa.timestamp("ms"))
    WRITERS[name](pa.table({"prompt": prompts, "category": times}), tmp_path / name)
    reasons = [getattr(row, "reason", None) for row in read(tmp_path / name)]
    assert reasons == [None, Reason.UNDECODABLE, Reason.TOO_LONG, Reason.UNDECODABLE, None]


@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.arrow"])
def test_a_damaged_table_is_rows_or_one_error_that_names_the_file(name, tmp_path):
    WRITERS[name](TABLE, tmp_path / name)
    whole, rng = (tmp_path / name).read_bytes(), random.Random(0)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (tmp_path / name).write_bytes(
            data if rng.random() < 0.8 else data[: rng.randrange(len(data))]
        )
        try:
            read(tmp_path / name)
        except DataError as error:
            refused += 1
            assert name in str(error)
    assert refused > 10


@pytest.mark.parametrize("name", ["a.feather", "a.arrow"])
def test_offsets_beyond_the_file_s_memory_are_never_read_even_beside_a_text_that_is_not_utf_8(
    name, tmp_path
):
    """Arrow names the first fault of a batch alone; one that comes later would end the process."""
    texts = pa.Array.from_buffers(
        pa.string(), 2, pa.array([b"\xff", b"why?"], pa.binary()).buffers()
    )
    inner = pa.array(["a", "b"])
    offsets = pa.py_buffer(array("i", [0, 2**30, 2]).tobytes())
    lists = pa.Array.from_buffers(pa.list_(pa.string()), 2, [None, offsets], children=[inner])
    table = pa.table({"prompt": texts, "turns": lists})
    batch = pa.RecordBatch.from_arrays([texts, lists], ["prompt", "turns"])
    sink = tmp_path / name
    with pa.OSFile(str(sink), "wb") as file:
        new = pa.ipc.new_file if name == "a.feather" else pa.ipc.new_stream
        with new(file, table.schema) as writer:
            writer.write_batch(batch)
    with pytest.raises(DataError, match=name):
        read(sink)


def test_a_table_of_more_bytes_than_the_limit_is_refused(tmp_path):
    WRITERS["a.parquet"](pa.table({"prompt": ["x" * 1000] * 1000}), tmp_path / "a.parquet")
    reader = SourceReader(
        SeedSource(path=tmp_path / "a.parquet"), "s", 10_000, max_file_bytes=500_000
    )
    with pytest.raises(DataError, match=r"seeds\.max_file_gb"):
        list(reader)


def test_a_table_is_streamed_however_large_its_row_groups(tmp_path):
    """One row group of 24 MB; columns that no form reads are not read at all."""
    many = pa.table(
        {"prompt": [f"{n} " + "x" * 1000 for n in range(12_000)], "noise": [b"y" * 1000] * 12_000}
    )
    pq.write_table(many, tmp_path / "a.parquet", row_group_size=12_000)
    del many
    before = most = pa.total_allocated_bytes()
    ids = []
    for row in SourceReader(SeedSource(path=tmp_path / "a.parquet"), "s", 10_000):
        ids.append(row.id)
        most = max(most, pa.total_allocated_bytes())
    assert ids[-1] == "s:11999" and most - before < 6e6


def test_a_table_without_a_known_column_says_which_it_has(tmp_path):
    WRITERS["a.parquet"](
        pa.table({"question": ["why?"], "when": [datetime.date(2024, 1, 1)]}),
        tmp_path / "a.parquet",
    )
    with pytest.raises(DataError, match="`question`, `when`"):
        read(tmp_path / "a.parquet")


CSV = 'id,prompt,note\n1,why?,\n2,"and, so\n""they"" say?",x\n3,one,too,many\n\n4,who?,\r\n'


@pytest.mark.parametrize(
    ("name", "delimiter"),
    [("a.csv", ","), ("a.csv", ";"), ("a.CSV", "\t"), ("a.tsv", "\t"), ("a.csv", "|")],
)
def test_records_of_a_csv_are_read_by_its_header_and_one_of_another_length_is_refused_alone(
    name, delimiter, tmp_path
):
    text = CSV.replace("and, so", "and so") if delimiter != "," else CSV
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.replace(",", delimiter).encode())
    rows = read(tmp_path / name)
    assert [row.source_id for row in rows if isinstance(row, Conversation)] == ["1", "2", "4"]
    assert rows[1].messages[0].content.replace(",", "") == 'and so\n"they" say?'
    assert (
        rows[2].reason == Reason.BROKEN_ROW
        and "4 fields" in rows[2].detail
        and "3 columns" in rows[2].detail
    )


def test_bad_bytes_and_fields_without_an_end_cost_their_records_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(text_rows, "MAX_ROW_BYTES", 1000)
    lines = [b"prompt", b"why?", b"\xff\xfe", b"x" * 2000, b'"' + b"y" * 2000 + b'"', b"and?"]
    (tmp_path / "a.csv").write_bytes(b"\n".join(lines))
    reasons = [getattr(row, "reason", None) for row in read(tmp_path / "a.csv")]
    assert reasons == [None, Reason.UNDECODABLE, Reason.TOO_LONG, Reason.TOO_LONG, None]
    (tmp_path / "b.csv").write_text('prompt\nwhy?\n"' + "never closed,\n" * 500)
    assert [getattr(row, "reason", None) for row in read(tmp_path / "b.csv")][:2] == [
        None,
        Reason.TOO_LONG,
    ]


def test_a_carriage_return_within_a_record_costs_that_record_alone_and_is_not_called_too_long(
    tmp_path,
):
    (tmp_path / "a.csv").write_bytes(b"prompt,note\nwhy?,a\nho\rw?,b\nand?,c\n")
    rows = read(tmp_path / "a.csv")
    assert [getattr(row, "reason", None) for row in rows] == [None, Reason.BROKEN_ROW, None]
    assert "new-line character" in rows[1].detail


def test_a_csv_without_a_header_says_that_its_first_line_was_taken_for_one(tmp_path):
    (tmp_path / "a.csv").write_text("why is the sky blue?\nwho are you?\n")
    with pytest.raises(
        DataError, match=r"`why is the sky blue\?`.*first line was taken for the names"
    ):
        read(tmp_path / "a.csv")


def test_a_list_of_turns_in_a_cell_is_read_as_json(tmp_path):
    cell = json.dumps(CHATS[0], ensure_ascii=False).replace('"', '""')
    (tmp_path / "a.csv").write_text(f'id,messages\n7,"{cell}"\n8,[broken\n', encoding="utf-8")
    rows = read(tmp_path / "a.csv")
    assert rows[0].messages[0].content == "问题 0?" and rows[1].reason == Reason.BROKEN_JSON
