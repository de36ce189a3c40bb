"""A shard is whole or absent, says what it is, and never loses or repeats a row."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.artifacts.seed_rows import SEEDS
from pipeline.conversations.conversation import Reason, RejectedRow
from pipeline.errors import DamagedShard
from pipeline.storage.receipts import note_path, read_receipt
from pipeline.storage.shards import ShardTask, ShardWriter, open_shard, read_rows
from tests.storage.rows import seed_row as row
from tests.storage.rows import write_shard

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)


def write(folder: Path, rows, refused=(), **options):
    path = folder / "shards" / "00000.parquet"
    return path, write_shard(path, rows, refused, **options)


def refused(row_id: str, text: str = "") -> RejectedRow:
    return RejectedRow(row_id, Reason.EMPTY, "no text", {"text": text})


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(TEXT, max_size=12), bad=st.lists(TEXT, max_size=4), group_size=st.integers(1, 13)
)
def test_rows_are_read_back_and_all_accounted_for(tmp_path_factory, texts, bad, group_size):
    folder = tmp_path_factory.mktemp("shard")
    rows = [row(f"s:{i}", text) for i, text in enumerate(texts)]
    quarantined = [refused(f"q:{i}", text) for i, text in enumerate(bad)]
    ids = [row["id"] for row in rows] + [row.id for row in quarantined]
    path, receipt = write(folder, rows, quarantined, ids_in=ids, group_size=group_size)
    assert list(read_rows(path)) == rows
    assert read_receipt(path) == receipt
    assert (receipt.num_rows, receipt.num_quarantined) == (len(rows), len(quarantined))
    lines = (folder / "quarantine" / "00000.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in lines] == [{"text": text} for text in bad]


@pytest.mark.parametrize(
    ("rows", "bad", "ids_in", "says"),
    [
        (["a"], [], ["a", "b"], "lost a row"),
        (["a", "b"], [], ["a"], "made one up"),
        (["a", "a"], [], ["a"], "repeats an id"),
        (["a"], ["a"], ["a"], "kept and rejected"),
        (["a#0", "a#1"], ["b"], ["a", "b", "c"], "lost a row"),
        (["a#0", "a#1"], ["b"], ["a", "b"], None),  # a split row counts for its parent
    ],
)
def test_a_lost_or_repeated_row_leaves_no_shard(tmp_path, rows, bad, ids_in, says):
    given = [row(i) for i in rows], [refused(i) for i in bad]
    if says is None:
        assert write(tmp_path, *given, ids_in=ids_in)[1].num_rows == len(rows)
        return
    with pytest.raises(AssertionError, match=says):
        write(tmp_path, *given, ids_in=ids_in)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_shard_gets_its_name_after_its_quarantine_file(tmp_path, disk_acts):
    """Or a killed writer leaves a shard whose rejected rows are in no file."""
    path, _ = write(tmp_path, [row("a")], [refused("b")])
    files = [tmp_path / "quarantine" / "00000.jsonl", path, tmp_path / "receipts" / "00000.json"]
    named = [inode for act, inode in disk_acts if act == "rename"]
    assert named == [file.stat().st_ino for file in files]
    for inode in named:
        assert disk_acts.index(("fsync", inode)) < disk_acts.index(("rename", inode))


def test_a_shard_that_was_not_committed_leaves_nothing(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        ShardWriter(
            ShardTask(0, tmp_path / "0.parquet", tmp_path / "q.jsonl", "f"), SEEDS
        ) as writer,
    ):
        writer.write([row("a")])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_equal_rows_have_equal_content_and_other_rows_have_not(tmp_path):
    one = write(tmp_path / "1", [row("a"), row("b")])[1]
    same = write(tmp_path / "2", [row("a"), row("b")])[1]
    other = write(tmp_path / "3", [row("a"), row("b", "hullo")])[1]
    assert one.content_sha256 == same.content_sha256 != other.content_sha256
    assert one.ids_sha256 == other.ids_sha256


def test_the_note_of_another_writer_s_file_does_not_count(tmp_path):
    """The shard's own writer was killed right after the rename."""
    path, _ = write(tmp_path, [row("s:0")])
    before = note_path(path).read_text()
    write(tmp_path, [row("s:1")])
    note_path(path).write_text(before)
    assert read_receipt(path).note is None


def test_a_flipped_bit_is_noticed_on_reading(tmp_path):
    path, _ = write(tmp_path, [row(f"a:{i}", "text " * 40) for i in range(200)])
    with open_shard(path) as shard:
        column = shard.metadata.row_group(0).column(5)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(DamagedShard, match=r"(?i)crc|checksum"):
        list(read_rows(path))
