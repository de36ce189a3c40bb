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
from pipeline.conversations.conversation import Conversation, Reason, RejectedRow
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


def reasons(rows) -> list[Reason | None]:
    return [getattr(row, "reason", None) for row in rows]


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
    assert [row.id for row in rows] == [f"s:{n}" for n in range(5)]
    assert [row.messages[0].content for row in rows] == TEXTS


def test_one_object_printed_over_many_lines_is_one_row(tmp_path):
    (row,) = read(written(tmp_path / "one.json", json.dumps(ROWS[3], indent=2)))
    assert row.messages[0].content == "问题 3?"


def test_a_line_cut_down_to_its_brace_costs_itself_alone(tmp_path):
    for broken in (0, 3, 5):
        lines = ['"why?"'] * 6
        lines[broken] = "{"
        rows = read(written(tmp_path / "cut.jsonl", "\n".join(lines)))
        assert len(rows) == 6
        assert [row.id for row in rows if isinstance(row, RejectedRow)] == [f"s:{broken}"]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 1 << 16])
def test_an_array_is_the_same_in_chunks_of_any_size(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(text_rows, "CHUNK_BYTES", chunk)
    texts = ["why?", 'a "quoted, [one]', "back\\slash\\", "怎么样 \\u00e4", "{", "月" * 9000]
    for indent in (None, 2):
        path = written(tmp_path / "rows.json", json.dumps(texts, indent=indent))
        with path.open("rb") as file:
            assert list(text_rows.json_rows(file, path)) == texts


def test_an_array_reads_any_number_and_rejects_a_broken_item_alone(tmp_path):
    number = "123456789012345678901234567890"
    items = [
        f'{{"id": {number}, "prompt": "why?", "x": 1e400}}',
        '{"prompt": }',
        '{"prompt": "a, [b] \\"{c"}',
        "",
        '"and?"',
    ]
    rows = read(written(tmp_path / "rows.json", "[" + ",\n ".join(items) + "]\n"))
    assert reasons(rows) == [None, Reason.BROKEN_JSON, None, Reason.BROKEN_JSON, None]
    assert rows[0].source_id == number and rows[2].messages[0].content == 'a, [b] "{c'


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 9])
def test_a_limit_counts_rejected_rows_and_all_files(limit, tmp_path):
    written(tmp_path / "a.jsonl", '"first"\nbroken')
    written(tmp_path / "b.jsonl", '"second"\n"third"')
    assert len(read(tmp_path, limit=limit)) == min(limit, 4)


# Damage costs the damaged row.

BAD_ROWS = {
    '"sec\\ud83dond"': Reason.UNDECODABLE,
    "\udc80 no JSON \udc80": Reason.UNDECODABLE,
    '{"prompt": "\udcff"}': Reason.UNDECODABLE,
    "{broken": Reason.BROKEN_JSON,
    '{"conversations": [': Reason.BROKEN_JSON,
    "1" * 5000: Reason.BROKEN_JSON,
    "[" * 100_000: Reason.BROKEN_JSON,
}


@pytest.mark.parametrize(("line", "reason"), BAD_ROWS.items(), ids=range(len(BAD_ROWS)))
def test_a_bad_line_costs_itself_alone(line, reason, tmp_path):
    data = f'"first"\n{line}\n"thi\\ud83d\\ude00rd"'.encode(errors="surrogateescape")
    rows = read(written(tmp_path / "a.jsonl", data))
    assert reasons(rows) == [None, reason, None]
    if reason is Reason.BROKEN_JSON:
        assert rows[1].row == line


@pytest.mark.parametrize("name", ["a.json", "a.txt"])
def test_undecodable_bytes_cost_their_row_alone(name, tmp_path):
    data = b"first\nsec\xe6\x9dond\nthird"
    if name == "a.json":
        data = b'["' + data.replace(b"\n", b'", "') + b'"]'
    rows = read(written(tmp_path / name, data))
    assert reasons(rows) == [None, Reason.UNDECODABLE, None] and "\ufffd" in rows[1].row


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
    assert reasons(found) == [None, Reason.TOO_LONG, None] and peak < 3e6


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json.gz", "rows.txt", "rows.csv.gz"])
def test_a_file_that_unpacks_to_more_than_the_limit_is_refused(tmp_path, name):
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
    assert reasons(rows) == [Reason.TOO_LONG, None] and matched < 1.1 * len(text)


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


@pytest.mark.parametrize("cut", [1, 40, 130, -1])
def test_a_truncated_array_is_an_error(cut, tmp_path):
    with pytest.raises(DataError, match=r"after [0-5] rows"):
        read(written(tmp_path / "a.json", json.dumps(ROWS).encode()[:cut]))


def test_an_array_with_a_bracket_too_many_is_an_error(tmp_path):
    with pytest.raises(DataError, match="after 5 rows"):
        read(written(tmp_path / "a.json", json.dumps(ROWS) + " ]"))


@pytest.mark.parametrize("cut", [15, -4])
def test_a_truncated_gzip_file_is_an_error(cut, tmp_path):
    with pytest.raises(DataError, match="damaged"):
        read(written(tmp_path / "a.jsonl.gz", gzip.compress(JSONL.encode())[:cut]))


def test_a_missing_path_is_an_error_of_the_configuration(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.*seeds\.sources"):
        read(tmp_path / "nowhere.jsonl")


# Directories.


def test_a_directory_is_its_files_in_order_with_rows_counted_through(tmp_path):
    (tmp_path / "later").mkdir()
    written(tmp_path / "later" / "c.txt", "third")
    written(tmp_path / "b.jsonl", '"second"')
    written(tmp_path / "a.json.gz", gzip.compress(b'["first", ""]'))
    rows = read(tmp_path)
    assert [row.id for row in rows] == ["s:0", "s:1", "s:2", "s:3"]
    assert reasons(rows) == [None, Reason.EMPTY, None, None]


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
    assert [row.messages[0].content for row in read_hub(tmp_path, limit=3)] == TEXTS[:3]
    with pytest.raises(ConfigError, match="split validation"):
        read_hub(tmp_path, split="validation")


def test_a_hub_out_of_reach_is_a_fault_of_the_environment(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\nlong trace")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(EnvironmentFault, match="Couldn't reach the Hub") as caught:
        read_hub("user/name")
    assert "long trace" not in str(caught.value)
