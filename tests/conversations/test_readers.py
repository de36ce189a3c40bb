"""Files and data sets as rows: each exactly once, damaged ones quarantined alone, and what is no
seed file refused.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.conversations.conversation import Conversation, Reason, RejectedRow
from pipeline.conversations.sources import SourceReader
from pipeline.errors import ConfigError, DataError, EnvironmentFault


@dataclass(frozen=True)
class Source:
    path: Path | None = None
    hub: str | None = None
    split: str = "train"
    format: str = "auto"
    limit: int | None = None
    columns: dict[str, str] | None = None


ROWS = [
    {"id": f"dump-{n}", "conversations": [{"from": "human", "value": f"问题 {n}?"}]}
    for n in range(5)
]


def read(path, **settings):
    return list(SourceReader(Source(path=path, **settings), "s", max_characters=1000))


def first_texts(outcomes):
    return [outcome.messages[0].content for outcome in outcomes]


def written(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


JSONL = "\n".join(json.dumps(row) for row in ROWS)
FORMS = {
    "a.jsonl": JSONL,
    "crlf-and-blank-lines.jsonl": JSONL.replace("\n", "\r\n\r\n") + "\r\n",
    "byte-order-mark.jsonl": b"\xef\xbb\xbf" + JSONL.encode(),
    "a.json": json.dumps(ROWS),
    "indented.json": json.dumps(ROWS, indent=2, ensure_ascii=False),
    "byte-order-mark.json": b"\xef\xbb\xbf \n" + json.dumps(ROWS).encode(),
    "lines-called.json": JSONL,
    "array-called.jsonl": json.dumps(ROWS),
    "a.jsonl.gz": gzip.compress(JSONL.encode()),
    "a.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "packed-called.jsonl": gzip.compress(JSONL.encode()),
    "a.txt": "\n".join(f"问题 {n}?" for n in range(5)),
    "a.txt.gz": gzip.compress("\n\n".join(f"问题 {n}?" for n in range(5)).encode()),
    "strings.json": json.dumps([f"问题 {n}?" for n in range(5)]),
    "strings.jsonl": "\n".join(json.dumps(f"问题 {n}?") for n in range(5)),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_kind_of_file_gives_its_rows_in_order_under_our_own_ids(name, tmp_path):
    outcomes = read(written(tmp_path / name, FORMS[name]))
    assert [outcome.id for outcome in outcomes] == [f"s:{n}" for n in range(5)]
    assert first_texts(outcomes) == [f"问题 {n}?" for n in range(5)]


def test_one_object_printed_over_many_lines_is_one_row(tmp_path):
    outcomes = read(written(tmp_path / "one.json", json.dumps(ROWS[3], indent=2)))
    assert first_texts(outcomes) == ["问题 3?"]


def test_an_array_larger_than_a_chunk_is_read_whole(tmp_path):
    rows = [{"prompt": f"{n} " + "月" * 40_000} for n in range(8)]
    path = written(tmp_path / "a.json", json.dumps(rows, ensure_ascii=False))
    outcomes = list(SourceReader(Source(path), "s", max_characters=10**6))
    assert first_texts(outcomes) == [row["prompt"] for row in rows]


def test_numbers_of_any_size_in_an_array_are_read(tmp_path):
    rows = read(
        written(
            tmp_path / "a.json",
            b'[{"prompt": "a", "id": 9223372036854775808}, {"prompt": "b", "x": 1e400}]',
        )
    )
    assert first_texts(rows) == ["a", "b"] and rows[0].source_id == str(2**63)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 9])
def test_a_limit_counts_rows_over_all_files_refused_ones_too(limit, tmp_path):
    written(tmp_path / "a.jsonl", '"first"\nbroken')
    written(tmp_path / "b.jsonl", '"second"\n"third"')
    assert len(read(tmp_path, limit=limit)) == min(limit, 4)


# Damage costs the damaged row.


def test_an_undecodable_line_of_jsonl_is_quarantined_alone(tmp_path):
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]
    lines[1] = lines[1].replace("问".encode(), b"\xff\xfe")
    lines[3] = b"\x80 not even JSON \x80"
    outcomes = read(written(tmp_path / "a.jsonl", b"\n".join(lines)))
    reasons = [getattr(outcome, "reason", None) for outcome in outcomes]
    assert reasons == [None, Reason.UNDECODABLE, None, Reason.UNDECODABLE, None]
    assert outcomes[1].row["id"] == "dump-1"
    assert "�" in outcomes[1].row["conversations"][0]["value"]
    assert outcomes[3].row == "� not even JSON �"


@pytest.mark.parametrize("name", ["a.json", "a.txt"])
def test_undecodable_bytes_cost_one_row_of_an_array_or_a_text_file_too(name, tmp_path):
    data = (
        b'["first", "sec\xe6\x9dond", "third"]'
        if name == "a.json"
        else b"first\nsec\xe6\x9dond\nthird"
    )
    outcomes = read(written(tmp_path / name, data))
    assert [getattr(outcome, "reason", None) for outcome in outcomes] == [
        None,
        Reason.UNDECODABLE,
        None,
    ]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_half_a_surrogate_pair_costs_its_row_alone(name, tmp_path):
    rows = ['"first"', '"sec\\ud83dond"', '"thi\\ud83d\\ude00rd"']
    data = f"[{','.join(rows)}]" if name == "a.json" else "\n".join(rows)
    outcomes = read(written(tmp_path / name, data))
    assert [getattr(outcome, "reason", None) for outcome in outcomes] == [
        None,
        Reason.UNDECODABLE,
        None,
    ]


@pytest.mark.parametrize(
    "line", ["{broken", '{"conversations": [', "1" * 5000, "[" * 100_000], ids=range(4)
)
def test_a_broken_line_of_jsonl_is_quarantined_alone_with_its_text(line, tmp_path):
    outcomes = read(written(tmp_path / "a.jsonl", f'"first"\n{line}\n"third"'))
    assert [getattr(outcome, "reason", None) for outcome in outcomes] == [
        None,
        Reason.BROKEN_JSON,
        None,
    ]
    assert outcomes[1].row == line


# What is no seed file.


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("empty.jsonl", b"", "empty"),
        ("blank.jsonl", b"\n \n", "empty"),
        ("empty.txt", b"", "empty"),
        ("none.json", b"[]", "empty"),
        ("empty.jsonl.gz", gzip.compress(b"", mtime=0), "empty"),
        (
            "table.jsonl",
            b'{"text": "Once", "label": 1}\n{"text": "upon", "label": 0}',
            "`text`, `label`",
        ),
        ("numbers.json", b"[1, 2, 3]", "a number"),
        ("package.json", b'{\n  "name": "left-pad",\n  "version": "1.0"\n}', "`name`, `version`"),
        ("prose.json", b"Call me Ishmael.\nSome years ago", "not valid JSON"),
        ("picture.jsonl", bytes(range(128, 256)) * 9, "not valid JSON"),
        ("utf-16.txt", "Hello?\n你好".encode("utf-16"), "not UTF-8"),
    ],
)
def test_a_file_without_conversations_says_what_was_found_and_what_was_expected(
    name, data, found, tmp_path
):
    with pytest.raises(DataError) as caught:
        read(written(tmp_path / name, data))
    assert found in str(caught.value)
    assert "ShareGPT" in str(caught.value) and "messages" in str(caught.value)
    assert name in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("cut", [1, 40, 130, -1])
def test_a_truncated_array_is_an_error_that_counts_the_rows_before_it(cut, tmp_path):
    whole = json.dumps(ROWS).encode()
    with pytest.raises(DataError, match=r"breaks off or is malformed after [0-5] rows"):
        read(written(tmp_path / "a.json", whole[:cut]))


def test_a_truncated_gzip_file_is_an_error(tmp_path):
    data = gzip.compress(JSONL.encode())
    for cut in (15, len(data) - 4):
        with pytest.raises(DataError, match="damaged"):
            read(written(tmp_path / "a.jsonl.gz", data[:cut]))


def test_a_missing_path_is_a_configuration_error_that_names_the_key(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.*seeds\.sources"):
        read(tmp_path / "nowhere.jsonl")


def test_a_directory_without_seed_files_is_an_error(tmp_path):
    written(tmp_path / "notes.md", "hello")
    with pytest.raises(DataError, match=r"\.jsonl"):
        read(tmp_path)


# The Hub.


def test_a_hub_data_set_is_streamed(tmp_path):
    pytest.importorskip("datasets")
    written(tmp_path / "train.jsonl", JSONL)
    source = Source(hub=str(tmp_path), limit=3)
    outcomes = list(SourceReader(source, "s", max_characters=1000))
    assert first_texts(outcomes) == ["问题 0?", "问题 1?", "问题 2?"]
    with pytest.raises(ConfigError, match="split validation"):
        list(SourceReader(Source(hub=str(tmp_path), split="validation"), "s", max_characters=1000))


def test_a_hub_out_of_reach_is_a_fault_of_the_environment(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\nlong trace")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(EnvironmentFault, match="Couldn't reach the Hub") as caught:
        list(SourceReader(Source(hub="user/name"), "s", max_characters=1000))
    assert "long trace" not in str(caught.value)


def test_an_array_reads_ids_of_any_size_and_a_row_that_is_no_json_costs_itself_alone(tmp_path):
    number = "123456789012345678901234567890"
    rows = [
        f'{{"id": {number}, "prompt": "why?"}}',
        '{"prompt": }',
        '{"prompt": "a, [b] \\"{c"}',
        "",
    ]
    path = tmp_path / "rows.json"
    path.write_text("[" + ",\n ".join([*rows, '{"prompt": "and?"}']) + "]\n")
    found = list(SourceReader(Source(path), "s", max_characters=1000))
    assert [type(row) for row in found] == [
        Conversation,
        RejectedRow,
        Conversation,
        RejectedRow,
        Conversation,
    ]
    assert found[0].source_id == number and found[2].messages[0].content == 'a, [b] "{c'
    assert {row.reason for row in found if isinstance(row, RejectedRow)} == {Reason.BROKEN_JSON}
