"""The files of a source: which are read, which are not and why, and the names of sources."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.conversations.conversation import Conversation, Reason
from pipeline.conversations.sources import SourceReader, name_sources
from pipeline.errors import DataError
from tests.conversations.test_readers import Source, read, written


def test_a_directory_is_its_files_in_order_with_rows_counted_through(tmp_path):
    (tmp_path / "later").mkdir()
    written(tmp_path / "later" / "c.txt", "third")
    written(tmp_path / "b.jsonl", '"second"')
    written(tmp_path / "a.json.gz", gzip.compress(b'["first", ""]'))
    outcomes = read(tmp_path)
    assert [outcome.id for outcome in outcomes] == ["s:0", "s:1", "s:2", "s:3"]
    assert [getattr(outcome, "reason", None) for outcome in outcomes] == [
        None,
        Reason.EMPTY,
        None,
        None,
    ]


def test_what_a_directory_holds_is_read_or_skipped_by_name_with_the_reason(tmp_path):
    """An upper-case suffix and a linked folder are read; what a suffix alone would make prompts of
    is not.
    """
    seeds, elsewhere = tmp_path / "seeds", tmp_path / "elsewhere"
    for folder in (seeds / "part", elsewhere):
        folder.mkdir(parents=True)
    for name in ("a.ndjson", "B.JSONL", "part/c.Jsonl.GZ", "d.txt"):
        written(seeds / name, gzip.compress(b'"hello?"') if name.endswith("GZ") else '"hello?"')
    written(seeds / "e.csv", "id,prompt\n7,hello?\n")
    written(elsewhere / "f.jsonl", '"hello?"')
    (seeds / "linked").symlink_to(elsewhere)
    (elsewhere / "round").symlink_to(seeds)
    (seeds / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    left_out = {
        "README.txt": "Call me Ishmael.",
        "LICENSE.txt": "MIT",
        "notes.md": "hello",
        "empty.jsonl": "",
        "blank.csv": "\n",
        "empty.parquet": "",
        "empty.arrow": "",
        "dataset_info.json": json.dumps({"features": {"text": "string"}, "splits": {}}),
        "numbers.json": "[1, 2]",
        ".cache.jsonl": '"hello?"',
    }
    for name, text in left_out.items():
        written(seeds / name, text)
    reader = SourceReader(Source(path=seeds), "s", max_characters=1000)
    assert [type(row) for row in reader] == [Conversation] * 6
    counts = {count.name: (count.rows, count.conversations) for count in reader.read}
    assert counts == dict.fromkeys(
        ["B.JSONL", "a.ndjson", "d.txt", "e.csv", "linked/f.jsonl", "part/c.Jsonl.GZ"], (1, 1)
    )
    skipped = {file.name: file.why for file in reader.skipped}
    assert skipped.keys() == {*left_out, "gone.jsonl", "linked/round"}
    assert "describes the folder" in skipped["README.txt"] and "suffix" in skipped["notes.md"]
    assert (
        skipped["empty.jsonl"] == skipped["blank.csv"] == "it is empty"
        and "hidden" in skipped[".cache.jsonl"]
    )
    assert (
        "`features`, `splits`" in skipped["dataset_info.json"]
        and "a number" in skipped["numbers.json"]
    )
    assert "links to nothing" in skipped["gone.jsonl"] and "read already" in skipped["linked/round"]


def test_a_directory_of_nothing_but_skipped_files_says_each_reason(tmp_path):
    written(tmp_path / "README.txt", "Call me Ishmael.")
    written(tmp_path / "b.json", '{"name": "x"}')
    with pytest.raises(
        DataError, match=r"README\.txt \(by its name.*b\.json \(it holds no conversation.*`name`"
    ):
        read(tmp_path)


# Names.


def test_names_are_unique_safe_and_never_paths():
    paths = [
        "/x/chat.json",
        "/y/chat.jsonl.gz",
        "chat-2.txt",
        "/x/a.gpt.json",
        "/种子.jsonl",
        "/a b:c#d.json",
        "/d/",
    ]
    sources = [
        *(Source(path=Path(path)) for path in paths),
        Source(hub="HuggingFaceH4/ultrachat_200k"),
    ]
    assert name_sources(sources) == [
        *("chat", "chat-2", "chat-2-2", "a.gpt", "source", "a-b-c-d", "d", "ultrachat_200k")
    ]


@given(st.lists(st.text(min_size=1).filter(lambda name: "\0" not in name), max_size=8))
def test_any_names_give_ids_that_split_again(names):
    made = name_sources([Source(path=Path("/seeds") / f"x{name}.jsonl") for name in names])
    assert len(set(made)) == len(names)
    assert not any(set(name) & set(":#/ ") for name in made)


def test_of_a_directory_tables_without_the_columns_that_are_named_are_skipped_and_say_so(tmp_path):
    written(tmp_path / "a.csv", "question\nwhy?\n")
    written(tmp_path / "labels.csv", "label\n1\n")
    reader = SourceReader(Source(path=tmp_path, columns={"prompt": "question"}), "s", 1000)
    assert [type(row) for row in reader] == [Conversation]
    assert [file.name for file in reader.skipped] == [
        "labels.csv"
    ] and "`question`" in reader.skipped[0].why
