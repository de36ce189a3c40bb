"""Files, directories and data sets as rows: each exactly once, damaged ones rejected alone."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import SeedSource
from pipeline.conversations import text_rows
from pipeline.conversations.conversation import Conversation, RejectedRow
from pipeline.conversations.sources import SourceReader, name_sources
from pipeline.errors import ConfigError, DataError, EnvironmentFault

ROWS = [
    {"id": f"dump-{n}", "conversations": [{"from": "human", "value": f"问题 {n}?"}]}
    for n in range(5)
]
TEXTS = [f"问题 {n}?" for n in range(5)]
JSONL = "\n".join(json.dumps(row) for row in ROWS)


def read(path, **settings) -> list[Conversation | RejectedRow]:
    return list(SourceReader(SeedSource(path=path, **settings), "s", max_characters=1000))


def written(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def outcomes(rows) -> str:
    """Each row's first text, or the reason of its rejection."""
    found = []
    for row in rows:
        found.append(row.reason if isinstance(row, RejectedRow) else row.messages[0].content)
    return " | ".join(found)


FILES = {
    "a.jsonl": JSONL,
    "crlf-and-blank-lines.jsonl": JSONL.replace("\n", "\r\n\r\n") + "\r\n",
    "byte-order-mark.jsonl": b"\xef\xbb\xbf" + JSONL.encode(),
    "indented.json": json.dumps(ROWS, indent=2, ensure_ascii=False),
    "byte-order-mark.json": b"\xef\xbb\xbf \n" + json.dumps(ROWS).encode(),
    "lines-called.json": JSONL,
    "array-called.jsonl": json.dumps(ROWS),
    "a.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "packed-called.jsonl": gzip.compress(JSONL.encode()),
    "a.txt": "\n".join(TEXTS),
    "a.txt.gz": gzip.compress("\n\n".join(TEXTS).encode()),
    "strings.json": json.dumps(TEXTS),
    "strings.jsonl": "\n".join(map(json.dumps, TEXTS)),
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_its_rows_in_order(name, tmp_path):
    rows = read(written(tmp_path / name, FILES[name]))
    assert outcomes(rows) == " | ".join(TEXTS)


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("one-object.json", b'{\n  "prompt": "a?"\n}', "a?"),
        ("a.jsonl", b'{\n"a?"\n"b?"', "broken-json | a? | b?"),
        ("a.jsonl", b'"a?"\n{\n"b?"\n{', "a? | broken-json | b? | broken-json"),
        ("a.jsonl", b'"a?"\n{"conversations": [\n"b?"', "a? | broken-json | b?"),
        ("a.jsonl", b'"a?"\n%s\n"b?"' % (b"1" * 5000), "a? | broken-json | b?"),
        ("a.jsonl", b'"a?"\n%s\n"b?"' % (b"[" * 100_000), "a? | broken-json | b?"),
        ("a.jsonl", b'"a?"\n{"prompt": "\xff"}\n"b?"', "a? | undecodable | b?"),
        ("a.jsonl", b'"a?"\n\x80 no JSON \x80\n"b?"', "a? | undecodable | b?"),
        ("a.jsonl", b'"\\ud83d\\ude00?"\n"b\\ud83d"', "😀? | undecodable"),
        ("a.json", b'["\\ud83d\\ude00?", "b\\ud83d"]', "😀? | undecodable"),
        ("a.json", b'["a?", "sec\xe6\x9dond", "c?"]', "a? | undecodable | c?"),
        ("a.txt", b"a?\nsec\xe6\x9dond\nc?", "a? | undecodable | c?"),
        ("a.json", b'["a?", {"prompt": }, "a, [b] \\"{c"]\n', 'a? | broken-json | a, [b] "{c'),
        ("a.json", b'["a?",, 1e400, "c?"]', "a? | broken-json | unknown-format | c?"),
    ],
)
def test_a_bad_row_costs_itself_alone(name, data, expected, tmp_path):
    rows = read(written(tmp_path / name, data))
    assert outcomes(rows) == expected
    assert [row.id for row in rows] == [f"s:{number}" for number in range(len(rows))]


def test_a_rejected_row_keeps_what_can_be_read_of_it(tmp_path):
    number = "123456789012345678901234567890"
    data = b'[{"id": %s, "prompt": "a?"}, {"prompt": "\xff"}, {"x": }]' % number.encode()
    first, second, third = read(written(tmp_path / "a.json", data))
    assert first.source_id == number
    assert (second.row, third.row) == ({"prompt": "\ufffd"}, '{"x": }')


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 1 << 16])
def test_an_array_is_the_same_in_chunks_of_any_size(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(text_rows, "CHUNK_BYTES", chunk)
    texts = ["why?", 'a "quoted, [one]', "back\\slash\\", "怎么样 \\u00e4", "{", "月" * 9000]
    for indent in (None, 2):
        path = written(tmp_path / "rows.json", json.dumps(texts, indent=indent))
        with path.open("rb") as file:
            assert list(text_rows.json_rows(file, path)) == texts


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 9])
def test_a_limit_counts_rejected_rows_and_all_files(limit, tmp_path):
    written(tmp_path / "a.jsonl", '"first"\nbroken')
    written(tmp_path / "b.jsonl", '"second"\n"third"')
    assert len(read(tmp_path, limit=limit)) == min(limit, 4)


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.txt", "rows.json.gz"])
def test_a_huge_row_is_rejected_alone_and_never_in_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(text_rows, "MAX_ROW_BYTES", 1000)
    rows = ['"why?"', f'"{"x" * 30_000_000}"', '"and?"']
    text = f"[{','.join(rows)}]" if ".json" in name and "jsonl" not in name else "\n".join(rows)
    data = text.encode()
    written(tmp_path / name, gzip.compress(data, 1) if name.endswith("gz") else data)
    del data, text, rows
    tracemalloc.start()
    found = read(tmp_path / name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcomes(found).replace('"', "") == "why? | too-long | and?" and peak < 3e6


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json.gz", "rows.txt", "rows.csv.gz"])
def test_a_file_that_unpacks_beyond_the_limit_is_refused(tmp_path, name):
    data = b"prompt\n" + b"hello there?\n" * 20_000
    if ".json." in name:
        data = b"[" + b'"hello there?",' * 20_000
    written(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
    reader = SourceReader(SeedSource(path=tmp_path / name), "s", 1000, max_file_bytes=200_000)
    rows = []
    with pytest.raises(DataError, match=r"seeds\.max_file_gb"):
        rows.extend(reader)
    assert 10_000 < len(rows) < 16_000


def test_a_long_string_of_an_array_takes_linear_time(tmp_path, monkeypatch):
    """Counted in bytes that are matched, as no test here depends on the clock."""
    matched = 0

    class Counting:
        def __init__(self, pattern):
            self.pattern = pattern

        def match(self, text, start):
            nonlocal matched
            found = self.pattern.match(text, start)
            matched += found.end() - start
            return found

    monkeypatch.setattr(text_rows, "OUTSIDE", Counting(text_rows.OUTSIDE))
    monkeypatch.setattr(text_rows, "IN_STRING", Counting(text_rows.IN_STRING))
    text = '\\"' + "x, [" * 1_000_000
    rows = read(written(tmp_path / "a.json", f'["{text}", "why?"]'))
    assert outcomes(rows) == "too-long | why?" and matched < 1.1 * len(text)


# Files without seeds.


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("empty.jsonl", b"", "empty"),
        ("blank.jsonl", b"\n \n", "empty"),
        ("none.json", b"[]", "empty"),
        ("empty.jsonl.gz", gzip.compress(b"", mtime=0), "empty"),
        ("table.jsonl", b'{"text": "Once", "label": 1}', "`text`, `label`"),
        ("numbers.json", b"[1, 2, 3]", "a number"),
        ("package.json", b'{\n  "name": "left-pad",\n  "version": "1.0"\n}', "`name`, `version`"),
        ("prose.json", b"Call me Ishmael.\nSome years ago", "not valid JSON"),
        ("picture.jsonl", bytes(range(128, 256)) * 9, "not valid JSON"),
        ("utf-16.txt", "Hello?\n你好".encode("utf-16"), "not UTF-8"),
    ],
)
def test_a_file_without_conversations_says_what_was_found(name, data, found, tmp_path):
    with pytest.raises(DataError) as caught:
        read(written(tmp_path / name, data))
    for word in (found, "ShareGPT", name):
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["[", '["a?", {"pro', '["a?"', '["a?"] ]', '["a?"]["b?"]'])
def test_an_array_whose_brackets_do_not_match_is_an_error(text, tmp_path):
    with pytest.raises(DataError, match=r"after \d rows"):
        read(written(tmp_path / "a.json", text))


@pytest.mark.parametrize("cut", [15, -4])
def test_a_truncated_gzip_file_is_an_error(cut, tmp_path):
    with pytest.raises(DataError, match="damaged"):
        read(written(tmp_path / "a.jsonl.gz", gzip.compress(JSONL.encode())[:cut]))


def test_a_missing_path_is_an_error_of_the_configuration(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.*seeds\.sources"):
        read(tmp_path / "nowhere.jsonl")


# Directories.


def test_a_directory_s_rows_are_numbered_across_sorted_files(tmp_path):
    (tmp_path / "later").mkdir()
    written(tmp_path / "later" / "c.txt", "third")
    written(tmp_path / "b.jsonl", '"second"')
    written(tmp_path / "a.json.gz", gzip.compress(b'["first", ""]'))
    rows = read(tmp_path)
    assert outcomes(rows) == "first | empty | second | third" and rows[3].id == "s:3"


def test_a_directory_s_files_are_read_or_skipped_by_name(tmp_path):
    """Linked folders are read; a file that describes the folder is not."""
    seeds, elsewhere = tmp_path / "seeds", tmp_path / "elsewhere"
    for folder in (seeds / "part", elsewhere):
        folder.mkdir(parents=True)
    for name in ("a.ndjson", "B.JSONL", "d.txt"):
        written(seeds / name, '"hello?"')
    written(seeds / "part/c.Jsonl.GZ", gzip.compress(b'"hello?"'))
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
        ".cache.jsonl": '"hello?"',
    }
    for name, text in left_out.items():
        written(seeds / name, text)
    reader = SourceReader(SeedSource(path=seeds), "s", max_characters=1000)
    assert [type(row) for row in reader] == [Conversation] * 6
    assert {(count.name, count.rows, count.conversations) for count in reader.read} == {
        (name, 1, 1)
        for name in ("B.JSONL", "a.ndjson", "d.txt", "e.csv", "linked/f.jsonl", "part/c.Jsonl.GZ")
    }
    skipped = {file.name: file.why for file in reader.skipped}
    assert skipped.keys() == {*left_out, "gone.jsonl", "linked/round"}
    assert "`features`, `splits`" in skipped["dataset_info.json"]


def test_a_directory_without_seeds_names_what_was_skipped(tmp_path):
    written(tmp_path / "README.txt", "Call me Ishmael.")
    written(tmp_path / "b.json", '{"name": "x"}')
    with pytest.raises(DataError, match=r"\.jsonl.*README\.txt.*b\.json.*`name`"):
        read(tmp_path)


def test_a_directory_s_tables_without_the_named_columns_are_skipped(tmp_path):
    written(tmp_path / "a.csv", "question\nwhy?\n")
    written(tmp_path / "labels.csv", "label\n1\n")
    source = SeedSource(path=tmp_path, columns={"prompt": "question"})
    reader = SourceReader(source, "s", 1000)
    assert [type(row) for row in reader] == [Conversation]
    assert [file.name for file in reader.skipped] == ["labels.csv"]


# Names.


def test_names_of_sources_are_unique_and_safe():
    paths = ["/x/chat.json", "/y/chat.jsonl.gz", "chat-2.txt", "/x/a.gpt.json"]
    paths += ["/种子.jsonl", "/a b:c#d.json", "/d/"]
    sources = [SeedSource(path=Path(path)) for path in paths]
    sources.append(SeedSource(hub="HuggingFaceH4/ultrachat_200k"))
    expected = "chat chat-2 chat-2-2 a.gpt source a-b-c-d d ultrachat_200k"
    assert name_sources(sources) == expected.split()


@given(st.lists(st.text(min_size=1).filter(lambda name: "\0" not in name), max_size=8))
def test_any_names_give_ids_that_split_again(names):
    paths = [Path("/seeds") / f"x{name}.jsonl" for name in names]
    made = name_sources([SeedSource(path=path) for path in paths])
    assert len(set(made)) == len(names)
    assert not any(set(name) & set(":#/ ") for name in made)


# The Hub.


def read_hub(hub, **settings):
    return list(SourceReader(SeedSource(hub=str(hub), **settings), "s", max_characters=1000))


def test_a_hub_data_set_is_streamed(tmp_path):
    written(tmp_path / "train.jsonl", JSONL)
    assert outcomes(read_hub(tmp_path, limit=3)) == " | ".join(TEXTS[:3])
    with pytest.raises(ConfigError, match="split validation"):
        read_hub(tmp_path, split="validation")


def test_an_unreachable_hub_is_an_environment_fault(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\nlong trace")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(EnvironmentFault, match="Couldn't reach the Hub") as caught:
        read_hub("user/name")
    assert "long trace" not in str(caught.value)
