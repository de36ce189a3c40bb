"""A file counts as unchanged by its content; what fails behind the writer is raised."""

from __future__ import annotations

import os
from dataclasses import replace

from pipeline.storage.fingerprint import FileFacts


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
