"""Errors of the disk are faults of the environment, whichever library meets them."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pipeline.errors import DataError, EnvironmentFault
from pipeline.storage.atomic import (
    atomic_directory,
    atomic_path,
    disk_errors,
    read_json,
    remove,
    write_text,
)
from tests.forks import in_a_fork

LIMIT = 4096  # bytes of a file
MANY = np.arange(2 * LIMIT)


WRITERS: dict[str, Callable[[Path], object]] = {
    "python": lambda path: path.write_bytes(bytes(2 * LIMIT)),
    "safetensors": lambda path: save_file({"a": torch.from_numpy(MANY)}, path),
    "tokenizers": lambda path: Tokenizer(
        WordLevel({str(i): i for i in range(LIMIT)}, unk_token="0")
    ).save(str(path)),
    "pyarrow": lambda path: pq.write_table(pa.table({"a": MANY}), path),
}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EDQUOT, "disk is full"),
        (errno.EFBIG, "disk is full"),
        (errno.EIO, "fails"),
        (errno.ESTALE, "fails"),
        (errno.EACCES, "cannot be opened or written"),
        (errno.EISDIR, "cannot be opened or written"),
        (errno.EROFS, "cannot be opened or written"),
    ],
)
def test_a_refusal_of_the_disk_is_one_readable_error(code, said, tmp_path):
    with pytest.raises(EnvironmentFault, match=said) as error, disk_errors(tmp_path):
        raise OSError(code, os.strerror(code), str(tmp_path / "events.jsonl"))
    assert error.value.exit_code == 4 and str(tmp_path) in str(error.value)


def write_beyond_the_limit(writer: str, path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
    with pytest.raises(EnvironmentFault, match="disk is full") as error, disk_errors(path):
        WRITERS[writer](path)
    assert error.value.exit_code == 4 and str(path) in str(error.value)


@pytest.mark.fault
@pytest.mark.parametrize("writer", WRITERS)
def test_every_library_s_file_size_error_is_a_full_disk(writer, tmp_path):
    ended, said = in_a_fork(write_beyond_the_limit, writer, tmp_path / "file")
    assert ended == 0, said


def test_a_full_disk_behind_another_error_is_recognised(tmp_path):
    behind = RuntimeError("The file cannot be made.")
    behind.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(EnvironmentFault, match="disk is full"), disk_errors(tmp_path):
        raise behind


def test_other_errors_pass_as_they_are(tmp_path):
    for other in (
        FileNotFoundError(errno.ENOENT, "no such file"),
        DataError("a row is damaged"),
        ValueError("no"),
    ):
        with pytest.raises(type(other)) as error, disk_errors(tmp_path):
            raise other
        assert error.value is other


def test_an_unreadable_record_is_not_absent(tmp_path):
    """Its stage would be made again; the address 0 of a process is what cannot be read without a
    broken disk.
    """
    with pytest.raises(EnvironmentFault, match="fails"):
        read_json(Path("/proc/self/mem"))
    assert read_json(tmp_path / "absent.json") is None and read_json(tmp_path) is None


def inode(path: Path) -> int:
    return path.stat().st_ino


def test_a_file_is_on_the_disk_before_its_name(tmp_path, disk_acts):
    write_text(tmp_path / "file", "content")
    file, directory = inode(tmp_path / "file"), inode(tmp_path)
    assert disk_acts == [("fsync", file), ("rename", file), ("fsync", directory)]


@pytest.mark.parametrize("exists", [False, True])
def test_a_directory_is_on_the_disk_before_its_names(tmp_path, disk_acts, exists):
    directory = tmp_path / "new"
    if exists:
        directory.mkdir()
    with atomic_directory(directory) as unfinished:
        (unfinished / "inner").mkdir()
        (unfinished / "inner" / "file").write_text("content")
    file, folder = directory / "inner" / "file", directory / "inner"
    written, named, folders = [file, folder, directory], [directory], [tmp_path]
    if exists:
        written, named, folders = [file], [file], [folder, directory, tmp_path]
    place = disk_acts.index(("rename", inode(named[0])))
    assert {("fsync", inode(path)) for path in written} == set(disk_acts[:place])
    assert {("fsync", inode(path)) for path in folders} == set(disk_acts[place + 1 :])


@pytest.mark.parametrize(
    ("code", "of_a_directory", "fails"),
    [
        (errno.EIO, False, True),
        (errno.EIO, True, True),
        (errno.EINVAL, False, True),
        (errno.EINVAL, True, False),  # as on network file systems
    ],
)
def test_content_that_does_not_reach_the_disk_is_an_error(
    tmp_path, monkeypatch, code, of_a_directory, fails
):
    (tmp_path / "file").write_text("old")

    def refuse(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode) == of_a_directory:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises((OSError, EnvironmentFault)) if fails else contextlib.nullcontext():
        write_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == ("old" if fails and not of_a_directory else "new")


def test_files_of_an_existing_directory_are_replaced_in_order(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("old")
    (tmp_path / "kept").write_text("kept")
    real, moved = os.replace, []
    monkeypatch.setattr(
        os, "replace", lambda *names: (moved.append(Path(names[1]).name), real(*names))
    )
    with atomic_directory(tmp_path, last="config.json") as unfinished:
        for name in ("config.json", "weights"):
            (unfinished / name).write_text("new")
    assert moved == ["weights", "config.json"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "config.json": "new",
        "weights": "new",
        "kept": "kept",
    }


def test_weights_are_as_readable_as_the_umask_allows(tmp_path):
    """safetensors makes its files 0600; a server often runs as somebody else."""
    (tmp_path / "plain").touch()
    with atomic_path(tmp_path / "heads.safetensors") as temporary:
        save_file({"a": torch.zeros(1)}, temporary)
    with atomic_directory(tmp_path / "export") as partial:
        save_file({"a": torch.zeros(1)}, partial / "model.safetensors")
    files = [tmp_path / name for name in ("plain", "heads.safetensors", "export/model.safetensors")]
    assert len({path.stat().st_mode for path in files}) == 1


def test_remove_takes_a_link_and_leaves_its_target(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").touch()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    remove(tmp_path / "link")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "kept"]
    remove(tmp_path / "folder")
    assert not list(tmp_path.iterdir())
