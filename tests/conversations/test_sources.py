"""Sources of seeds: single files, directories and data sets of the Hub, under unique names."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pyarrow import csv

from pipeline.config import SeedSource
from pipeline.config.load import load_config
from pipeline.conversations.conversation import Conversation, Message, RejectedRow
from pipeline.conversations.sources import SourceReader, name_sources
from pipeline.errors import ConfigError, DataError, EnvironmentFault


def read(path, **settings) -> list[Conversation | RejectedRow]:
    return list(SourceReader(SeedSource(path=path, **settings), "s"))


def written(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def outcomes(rows) -> str:
    """Each row's first text, or the reason of its rejection."""
    found = []
    for row in rows:
        found.append(row.reason if isinstance(row, RejectedRow) else row.messages[0].content)
    return " | ".join(found)


def test_refused_rows_name_the_setting_that_reads_them(tmp_path, monkeypatch):
    file = written(tmp_path / "faq.jsonl", '{"question": "why"}')
    with pytest.raises(DataError, match="`question`") as refused:
        read(file)
    word = re.search('"(.+)"', refused.value.fix)[1].replace("FILE", "faq.jsonl")
    monkeypatch.chdir(tmp_path)
    [source] = load_config("qwen2.5-7b", [word]).seeds.sources
    assert outcomes(read(file, columns=source.columns)) == "why"


@pytest.mark.parametrize("limit", [2, 3, 9])
def test_a_limit_counts_rejected_rows_and_all_files(limit, tmp_path):
    written(tmp_path / "a.jsonl", '"first"\nbroken')
    written(tmp_path / "b.jsonl", '"second"\n"third"')
    assert len(read(tmp_path, limit=limit)) == min(limit, 4)


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("empty.jsonl", b"", "empty"),
        ("table.jsonl", b'{"text": "Once", "label": 1}', "`text`, `label`"),
        ("prose.json", b"Call me Ishmael.\nSome years ago", "not valid JSON"),
        ("prompts.csv", b"why is the sky blue?\nwho are you?\n", "why is the sky blue"),
    ],
)
def test_a_file_without_conversations_is_refused_with_its_first_row(name, data, found, tmp_path):
    with pytest.raises(DataError) as caught:
        read(written(tmp_path / name, data))
    for word in (found, "ShareGPT", name):
        assert word in str(caught.value)


def test_a_missing_path_is_an_error_of_the_configuration(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.*seeds\.sources"):
        read(tmp_path / "nowhere.jsonl")


def test_a_directory_s_rows_are_numbered_across_sorted_files(tmp_path):
    (tmp_path / "later").mkdir()
    written(tmp_path / "later" / "c.txt", "third")
    written(tmp_path / "b.jsonl", '"second"')
    written(tmp_path / "a.json.gz", gzip.compress(b'["first", ""]'))
    rows = read(tmp_path)
    assert outcomes(rows) == "first | empty | second | third" and rows[3].id == "s:3"


def test_a_directory_s_seed_files_are_read(tmp_path):
    (tmp_path / "part").mkdir()
    names = ["B.JSONL", "a.ndjson", "d.json", "part/c.Jsonl"]
    for name in names:
        written(tmp_path / name, '"hello?"')
    (tmp_path / "linked").symlink_to(tmp_path / "part")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    for name in ("README.txt", "notes.md", ".cache.jsonl"):
        written(tmp_path / name, '"hello?"')
    written(tmp_path / "info.json", '{"features": 1}')
    reader = SourceReader(SeedSource(path=tmp_path), "s")
    assert outcomes(reader) == "hello? | hello? | hello? | unknown-format | hello?"
    found = [(count.name, count.rows, count.conversations) for count in reader.read]
    assert sorted(found) == sorted([(name, 1, 1) for name in names] + [("info.json", 1, 0)])
    for name in names:
        (tmp_path / name).unlink()
    with pytest.raises(DataError, match="`features`"):
        read(tmp_path)
    (tmp_path / "info.json").unlink()
    with pytest.raises(DataError, match=r"no seed files.*\.jsonl"):
        read(tmp_path)


def test_names_of_sources_are_unique_and_safe():
    paths = ["/x/chat.json", "/y/chat.jsonl.gz", "chat-2.txt", "/x/a.gpt.json"]
    paths += ["/种子.jsonl", "/a b:c#d.json", "/d/"]
    sources = [SeedSource(path=Path(path)) for path in paths]
    sources.append(SeedSource(hub="HuggingFaceH4/ultrachat_200k"))
    expected = "chat chat-2 chat-2-2 a.gpt source a-b-c-d d ultrachat_200k"
    assert name_sources(sources) == expected.split()


ROWS = [{"q": f"问题 {n}?", "a": "So.", "number": n, "prompt": "not this one"} for n in range(5)]
COLUMNS = {"prompt": "q", "response": "a", "id": "number"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "hub"])
def test_columns_of_other_names_are_read_or_missed_by_name(name, tmp_path):
    path = tmp_path / name.replace("hub", "train.jsonl")
    lines = [",".join(ROWS[0]), *(",".join(map(str, row.values())) for row in ROWS)]
    written(path, "\n".join(lines if name == "a.csv" else map(json.dumps, ROWS)))
    source = {"hub": str(tmp_path)} if name == "hub" else {"path": path}
    rows = list(SourceReader(SeedSource(**source, columns=COLUMNS), "s"))
    said = (Message("user", "问题 3?"), Message("assistant", "So."))
    assert len(rows) == 5 and rows[3] == Conversation("s:3", said, "3")
    # Rows of JSON may differ, a table's columns may not.
    error = DataError if name == "a.jsonl" else ConfigError
    with pytest.raises(error, match=r"`question`.*`q`, `a`, `number`"):
        list(SourceReader(SeedSource(**source, columns={"prompt": "question"}), "s"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv"])
def test_rows_of_no_form_are_refused_with_all_their_columns(name, tmp_path):
    row = {"id": "7", "conversation": "Hello?", "model": "v", "turn": 1}
    rows = pa.Table.from_pylist([row])
    path = written(tmp_path / name, json.dumps(row))
    if name.endswith("parquet"):
        pq.write_table(rows, path)
    elif name.endswith("csv"):
        csv.write_csv(rows, path)
    with pytest.raises(DataError, match="`id`, `conversation`, `model`, `turn`"):
        read(path)


@pytest.mark.parametrize(("name", "zone"), [("train.jsonl", None), ("train.parquet", 2)])
def test_functions_of_a_hub_data_set_are_those_of_its_rows(name, zone, tmp_path):
    rows = [
        {"prompt": "Sunny?", "tools": [{"name": "weather", "in": {"city": 1}}]},
        {"prompt": "Late?", "tools": [{"name": "clock", "in": {"zone": zone}}]},
        {"prompt": "Sum?", "tools": [{"name": "add"}]},
    ]
    lines = "\n".join(map(json.dumps, rows))
    expected = read(written(tmp_path / "rows.jsonl", lines))
    (tmp_path / "hub").mkdir()
    path = written(tmp_path / "hub" / name, lines)
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    assert list(SourceReader(SeedSource(hub=str(path.parent)), "s")) == expected


LONG = "The wall is 21,196 km long, and parts of it were built in the seventh century BC. " * 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_text_in_a_column_that_is_not_read_is_a_warning_with_the_setting_that_reads_it(
    name, tmp_path
):
    """Dolly has such questions about a `context`."""
    rows = []
    for n in range(9):
        row = {"instruction": f"{n}?", "context": LONG if n % 3 else "", "response": "So."}
        row |= {"category": "closed_qa", "url": "https://example.org/" + "a" * 200}
        if n == 1 or not name.endswith("jsonl"):
            row["system_prompt"] = "Be brief."
        rows.append(row)
    path = written(tmp_path / name, "\n".join(map(json.dumps, rows)))
    table = pa.Table.from_pylist(rows)
    if name.endswith("csv"):
        csv.write_csv(table, path)
    elif name.endswith("parquet"):
        pq.write_table(table, path)
    reader = SourceReader(SeedSource(path=path), "s")
    assert len(list(reader)) == 9
    [warning] = reader.warnings()
    assert "`context`" in warning and " 6 of 9 " in warning and "url" not in warning
    columns = yaml.safe_load(re.search(r"columns: ({.*?})", warning)[1])
    again = SourceReader(SeedSource(path=path, columns=columns), "s")
    found = list(again)
    assert len(found) == 9, "a row may lack an optional column"
    system, question, answer = (message.content for message in found[1].messages)
    assert (system, question, answer) == ("Be brief.", f"1?\n\n{LONG.strip()}", "So.")
    assert again.warnings() == []


def test_a_hub_data_set_is_streamed_or_refused(tmp_path, monkeypatch):
    def read_hub(**settings):
        return list(SourceReader(SeedSource(hub=str(tmp_path), **settings), "s"))

    written(tmp_path / "train.jsonl", "\n".join(f'{{"prompt": "{n}?"}}' for n in range(5)))
    assert outcomes(read_hub(limit=3)) == "0? | 1? | 2?"
    with pytest.raises(ConfigError, match="split validation"):
        read_hub(split="validation")

    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\nlong trace")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(EnvironmentFault, match="Couldn't reach the Hub") as caught:
        read_hub()
    assert "long trace" not in str(caught.value)
