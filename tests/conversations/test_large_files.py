"""Files of any size: read in chunks, a row over the limit refused alone, in time linear in its
length.
"""

from __future__ import annotations

import gzip
import json
import tracemalloc

import pytest

from pipeline.conversations import text_rows
from pipeline.conversations.conversation import Conversation, Reason, RejectedRow
from pipeline.conversations.sources import SourceReader
from pipeline.errors import DataError
from tests.conversations.test_readers import Source, read, written


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_an_array_is_the_same_in_chunks_of_any_size(tmp_path, monkeypatch, chunk):
    rows = [
        {"prompt": text}
        for text in ("why?", 'a "quoted, [one]', "back\\slash\\", "怎么样 \\u00e4", "{")
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    monkeypatch.setattr(text_rows, "CHUNK_BYTES", chunk)
    with (tmp_path / "rows.json").open("rb") as file:
        assert list(text_rows.json_rows(file, tmp_path)) == rows


@pytest.mark.parametrize(
    "name", ["rows.json", "rows.jsonl", "rows.txt", "rows.json.gz", "rows.jsonl.gz"]
)
def test_a_row_of_more_bytes_than_the_limit_is_refused_alone_and_never_held_in_memory(
    tmp_path, monkeypatch, name
):
    monkeypatch.setattr(text_rows, "MAX_ROW_BYTES", 1000)
    rows = ['"why?"', f'"{"x" * 30_000_000}"', '"and?"']
    data = (
        f"[{','.join(rows)}]" if ".json" in name and "jsonl" not in name else "\n".join(rows)
    ).encode()
    (tmp_path / name).write_bytes(gzip.compress(data, 1) if name.endswith("gz") else data)
    del data, rows
    tracemalloc.start()
    found = list(SourceReader(Source(tmp_path / name), "s", max_characters=1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [type(row) for row in found] == [Conversation, RejectedRow, Conversation]
    assert found[1].reason == Reason.TOO_LONG and peak < 3e6


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json.gz", "rows.txt", "rows.csv.gz"])
def test_a_file_that_unpacks_to_more_than_the_limit_is_refused_and_names_the_key(tmp_path, name):
    data = b"prompt\n" + b"hello there?\n" * 20_000
    data = b"[" + b'"hello there?",' * 20_000 if ".json." in name else data
    data = gzip.compress(data) if name.endswith("gz") else data
    rows, reader = (
        [],
        SourceReader(Source(written(tmp_path / name, data)), "s", 1000, max_file_bytes=200_000),
    )
    with pytest.raises(DataError, match=r"more than 0.0002 GB, unpacked.*seeds\.max_file_gb"):
        rows.extend(reader)
    assert 10_000 < len(rows) < 16_000


def test_one_long_string_of_an_array_takes_time_linear_in_its_length(tmp_path, monkeypatch):
    """Counted in bytes that are matched, as no test here depends on the clock."""
    looked_at = 0

    class Counting:
        def __init__(self, pattern):
            self.pattern = pattern

        def match(self, text, start):
            nonlocal looked_at
            found = self.pattern.match(text, start)
            looked_at += found.end() - start
            return found

    for name in ("OUTSIDE", "IN_STRING"):
        monkeypatch.setattr(text_rows, name, Counting(getattr(text_rows, name)))
    for megabytes in (1, 4):
        looked_at = 0
        text = '\\"' + "x, [" * (megabytes * 250_000)
        rows = read(written(tmp_path / "a.json", f'["{text}", "why?"]'))
        assert [row.reason for row in rows[:1]] == [Reason.TOO_LONG]
        assert isinstance(rows[1], Conversation)
        assert looked_at < 1.1 * len(text)
