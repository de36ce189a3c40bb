"""A shard is whole or absent, says what it is, and never loses or repeats a row."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.artifacts.seed_rows import SEEDS
from pipeline.conversations.conversation import Reason, RejectedRow
from pipeline.errors import DamagedShard, EnvironmentFault
from pipeline.storage.receipts import note_path, read_receipt
from pipeline.storage.shards import ShardWriter, open_shard, read_rows

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)


def row(row_id: str, text: str = "hello") -> dict:
    return {
        "id": row_id,
        "source_id": None,
        "category": None,
        "split": "train",
        "messages": [{"role": "user", "content": text, "tool_calls": None}],
        "tools": None,
    }


def write(folder, rows, refused=(), *, ids_in=None, fingerprint="f" * 64, groups=1):
    path, quarantine = folder / "shards" / "00000.parquet", folder / "quarantine" / "00000.jsonl"
    with ShardWriter(path, quarantine, SEEDS, index=0, fingerprint=fingerprint) as writer:
        size = max(1, -(-len(rows) // groups))
        for start in range(0, len(rows), size):
            writer.write(rows[start : start + size])
        for one in refused:
            writer.reject(one)
        receipt = writer.commit("seeds", ids_in)
    return path, receipt


def refused(row_id: str, text: str = "") -> RejectedRow:
    return RejectedRow(row_id, Reason.EMPTY, "no text", {"text": text})


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(TEXT, max_size=12), bad=st.lists(TEXT, max_size=4), groups=st.integers(1, 3))
def test_what_was_written_is_read_back_and_every_row_is_accounted_for(
    tmp_path_factory, texts, bad, groups
):
    folder = tmp_path_factory.mktemp("shard")
    rows = [row(f"s:{i}", text) for i, text in enumerate(texts)]
    quarantined = [refused(f"s:{len(texts) + i}", text) for i, text in enumerate(bad)]
    ids = [r["id"] for r in rows] + [q.id for q in quarantined]
    path, receipt = write(folder, rows, quarantined, ids_in=ids, groups=groups)
    assert list(read_rows(path)) == rows
    assert read_receipt(path) == receipt
    assert (receipt.num_rows, receipt.num_quarantined) == (len(rows), len(quarantined))
    lines = [
        json.loads(line)
        for line in (folder / "quarantine" / "00000.jsonl").read_text().splitlines()
    ]
    assert [line["row"] for line in lines] == [{"text": text} for text in bad]


@pytest.mark.parametrize(
    ("rows", "bad", "ids_in", "says"),
    [
        (["a"], [], ["a", "b"], "lost a row"),
        (["a", "b"], [], ["a"], "made one up"),
        (["a", "a"], [], ["a"], "repeats an id"),
        (["a"], ["a"], ["a"], "kept and rejected"),
        (["a#0", "a#1"], ["b"], ["a", "b", "c"], "lost a row"),
    ],
)
def test_a_lost_or_repeated_row_stops_the_commit_and_leaves_no_file(
    tmp_path, rows, bad, ids_in, says
):
    with pytest.raises(AssertionError, match=says):
        write(tmp_path, [row(i) for i in rows], [refused(i) for i in bad], ids_in=ids_in)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_split_row_counts_for_its_parent(tmp_path):
    _, receipt = write(tmp_path, [row("a#0"), row("a#1")], [refused("b")], ids_in=["a", "b"])
    assert receipt.num_rows == 2


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
            tmp_path / "0.parquet", tmp_path / "q.jsonl", SEEDS, index=0, fingerprint="f"
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


def test_a_truncated_or_foreign_file_has_no_receipt(tmp_path):
    path, _ = write(tmp_path, [row(f"a:{i}") for i in range(50)])
    path.write_bytes(path.read_bytes()[:-20])
    assert read_receipt(path) is None
    pq.write_table(pa.table({"id": ["x"]}), path)
    assert read_receipt(path) is None


def test_a_note_that_the_disk_does_not_give_back_is_not_absent(tmp_path):
    """Its shard would be called another run's; the address 0 of a process is what no disk gives
    back.
    """
    path, _ = write(tmp_path, [row("a")])
    note_path(path).unlink()
    note_path(path).symlink_to("/proc/self/mem")
    with pytest.raises(EnvironmentFault, match="Input/output error"):
        read_receipt(path)


def test_a_flipped_bit_in_a_page_is_noticed_when_it_is_read(tmp_path):
    path, _ = write(tmp_path, [row(f"a:{i}", "text " * 40) for i in range(200)])
    with open_shard(path) as shard:
        column = shard.metadata.row_group(0).column(5)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(DamagedShard, match=r"(?i)crc|checksum"):
        list(read_rows(path))
