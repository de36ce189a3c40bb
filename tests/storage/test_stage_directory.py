"""A stage directory knows what is done, what is pending and what has become stale."""

import multiprocessing
import os
import shutil

import pytest

from pipeline.errors import DataError, EnvironmentFault
from pipeline.storage.atomic import write_json
from pipeline.storage.fingerprint import FileDigests, fingerprint, ids_digest
from pipeline.storage.locks import Lock
from pipeline.storage.receipts import read_receipt
from pipeline.storage.stage_directory import StageDirectory
from tests.storage.rows import seed_row, write_shard


def fill(stage: StageDirectory, indices, *, text="hello", upstream=""):
    for index in indices:
        options = {"index": index, "fingerprint": stage.fingerprint, "upstream": upstream}
        write_shard(stage.shard_path(index), [seed_row(f"s:{index}", text)], **options)


@pytest.fixture
def pair(tmp_path):
    up = StageDirectory(tmp_path, "seeds", "a" * 64)
    down = StageDirectory(tmp_path, "generate", "b" * 64)
    up.create({})
    fill(up, range(3))
    up.finish({}, {})
    down.create({})
    return up, down


def do(down, up, indices):
    for task in down.tasks(up, up.receipts()):
        if task.index in indices:
            fill(down, [task.index], upstream=task.upstream)


def pending(down, up) -> list[int]:
    tasks = down.tasks(up, up.receipts())
    return [task.index for task in down.pending(tasks, down.receipts())]


def test_only_missing_damaged_foreign_and_outdated_shards_are_pending(pair):
    up, down = pair
    do(down, up, range(3))
    assert pending(down, up) == []
    down.shard_path(0).unlink()
    down.shard_path(1).write_bytes(b"PAR1 no")
    down.quarantine_path(2).unlink()
    assert pending(down, up) == [0, 1, 2]
    do(down, up, range(3))
    foreign = StageDirectory(down.path.parent, "generate", "c" * 64)
    do(foreign, up, [2])
    shutil.copy(foreign.shard_path(2), down.shard_path(2))
    assert pending(down, up) == [2]
    do(down, up, [2])
    fill(up, [1], text="another text")
    assert pending(down, up) == [1]


def test_a_stage_is_current_until_files_or_upstream_change(pair):
    up, down = pair
    do(down, up, range(3))
    upstream = {"seeds": up.content}
    down.finish({"rows": 3}, upstream)
    assert down.is_current(upstream) and down.summary == {"rows": 3} and down.verify() == []
    assert not down.is_current({"seeds": "something else"})
    down.shard_path(0).write_bytes(b"")
    assert down.resized_files() and down.examine() == [down.shard_path(0)]
    assert "damaged" in down.verify()[0]
    assert down.begin(upstream) == [down.shard_path(0)]
    assert down.done is None and len(down.shards()) == 2


def test_results_of_other_upstream_are_dropped_except_shards(pair):
    up, down = pair
    down.begin({"seeds": "one"})
    do(down, up, range(3))
    write_json(down.path / "heads.json", {})
    down.begin({"seeds": "one"})
    assert (down.path / "heads.json").exists()
    down.begin({"seeds": "two"})
    assert not (down.path / "heads.json").exists()
    assert len(down.shards()) == 3


def hold(path, ready, release):
    with StageDirectory(path, "train", "d" * 64).lock as lock:
        lock.own()
        ready.set()
        release.wait(60)


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(tmp_path, ready, release))
    holder.start()
    assert ready.wait(60)
    for take in (Lock.own, Lock.share):
        stage = StageDirectory(tmp_path, "train", "d" * 64)
        with pytest.raises(EnvironmentFault, match=f"process {holder.pid} on"), stage.lock as lock:
            take(lock)
    holder.kill()
    holder.join()
    with StageDirectory(tmp_path, "train", "d" * 64).lock as lock:
        lock.own()


def test_a_fingerprint_ignores_the_order_of_keys():
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert len({fingerprint({"a": v}) for v in (1, 2, "1", [1], {"a": 1}, None)}) == 6
    assert ids_digest(["ab", "c"]) != ids_digest(["a", "bc"])


def test_a_digest_notices_content_of_equal_size_and_time(tmp_path):
    file, cache = tmp_path / "w.bin", tmp_path / "digests.json"
    file.write_bytes(b"one")
    before, times = FileDigests(cache).of(file), file.stat()
    assert FileDigests(cache).of(file) == before
    file.write_bytes(b"two")
    while file.stat().st_ctime_ns == times.st_ctime_ns:  # the clock's tick
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert FileDigests(cache).of(file) != before


def test_a_stage_directory_that_is_a_link_is_refused(tmp_path):
    """A run copied with its links has one: writing would change the original."""
    stage = StageDirectory(tmp_path / "copy", "train", "ab" * 32)
    original = tmp_path / "original"
    original.mkdir()
    (original / "heads.safetensors.0123456789ab.tmp").touch()
    stage.path.parent.mkdir()
    stage.path.symlink_to(original)
    with pytest.raises(DataError, match=f"directory is a link.*{stage.path.name}"):
        stage.enter({})
    assert [path.name for path in original.iterdir()] == ["heads.safetensors.0123456789ab.tmp"]


def test_a_file_that_no_record_names_is_never_read(pair):
    """A shard of another run, or a copy of one's own."""
    up, _ = pair
    rows = [read_receipt(path) for path in up.shards()]
    shutil.copy(up.shard_path(0), up.shard_path(0).with_name("00000-copy.parquet"))
    other = StageDirectory(up.path.parent, "seeds", "c" * 64)
    fill(other, [7])
    shutil.copy(other.shard_path(7), up.shard_path(7))
    assert [read_receipt(path) for path in up.shards()] == rows
    assert up.is_whole({}) and up.verify() == []
