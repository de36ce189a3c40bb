"""A file counts as unchanged by its content; what fails behind the writer is raised."""

from __future__ import annotations

import errno
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.storage.checksums import WORTH_A_THREAD, FileFacts, HashedFile


def test_a_touched_file_is_unchanged_and_another_content_is_not(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"one")
    written = FileFacts.of(file)
    os.utime(file, ns=(1, written.mtime_ns + 1))
    assert written.renewed(file) == replace(written, mtime_ns=written.mtime_ns + 1)
    for content in (b"two", b"four"):
        file.write_bytes(content)
        os.utime(file, ns=(1, written.mtime_ns + 1))
        assert written.renewed(file) is None
    file.unlink()
    assert written.renewed(file) is None


@pytest.mark.parametrize("size", [WORTH_A_THREAD - 1, WORTH_A_THREAD, 3 * WORTH_A_THREAD + 1])
def test_blocks_of_any_size_are_written_and_hashed_in_order(tmp_path, size):
    blocks = [bytes([number]) * size for number in range(4)]
    with ThreadPoolExecutor(3) as threads, HashedFile(tmp_path / "file", threads) as file:
        for block in blocks:
            file.write(block)
        sha256 = file.sync()
    content = (tmp_path / "file").read_bytes()
    assert content == b"".join(blocks) and sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_what_fails_behind_the_writer_is_raised():
    with ThreadPoolExecutor(3) as threads, HashedFile(Path("/dev/full"), threads) as file:
        file.write(bytes(WORTH_A_THREAD))
        with pytest.raises(OSError) as refused:
            file.sync()
    assert refused.value.errno == errno.ENOSPC
