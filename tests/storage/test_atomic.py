"""What the disk refuses is told as the user's to mend, whichever library met it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.errors import DataError, EnvironmentFault
from pipeline.storage.atomic import atomic_directory, atomic_path, disk_errors, remove, write_text


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EDQUOT, "disk is full"),
        (errno.EACCES, "cannot be opened or written"),
        (errno.EISDIR, "stands where a file belongs"),
        (errno.EROFS, "cannot be opened or written"),
    ],
)
def test_a_refusal_of_the_disk_is_one_readable_error(code, said, tmp_path):
    with pytest.raises(EnvironmentFault, match=said) as error, disk_errors(tmp_path):
        raise OSError(code, os.strerror(code), str(tmp_path / "events.jsonl"))
    assert error.value.exit_code == 4 and str(tmp_path) in str(error.value)


def test_other_errors_pass_as_they_are(tmp_path):
    for other in (FileNotFoundError(errno.ENOENT, "no such file"), DataError("a row is damaged"), ValueError("no")):
        with pytest.raises(type(other)) as error, disk_errors(tmp_path):
            raise other
        assert error.value is other


def test_a_directory_whose_writing_was_interrupted_is_absent(tmp_path):
    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "new" / "target") as unfinished:
        (unfinished / "config.json").write_text("{")
        assert not (tmp_path / "new" / "target").exists()
        raise KeyboardInterrupt
    assert not list((tmp_path / "new").iterdir())


def inode(path: Path) -> int:
    return path.stat().st_ino


def test_a_file_is_on_the_disk_before_its_name(tmp_path, disk_acts):
    write_text(tmp_path / "file", "content")
    file, directory = inode(tmp_path / "file"), inode(tmp_path)
    assert disk_acts == [("fsync", file), ("rename", file), ("fsync", directory)]


def test_a_new_directory_is_on_the_disk_before_its_name(tmp_path, disk_acts):
    with atomic_directory(tmp_path / "new") as unfinished:
        (unfinished / "inner").mkdir()
        (unfinished / "inner" / "file").write_text("content")
    parts = {inode(tmp_path / name) for name in ("new/inner/file", "new/inner", "new")}
    *flushed, renamed, last = disk_acts
    assert sorted(flushed) == [("fsync", part) for part in sorted(parts)]
    assert renamed == ("rename", inode(tmp_path / "new")) and last == ("fsync", inode(tmp_path))


def test_replaced_files_are_on_the_disk_before_their_names(tmp_path, disk_acts):
    with atomic_directory(tmp_path) as unfinished:
        (unfinished / "inner").mkdir()
        (unfinished / "inner" / "file").write_text("content")
    file, folder = inode(tmp_path / "inner" / "file"), inode(tmp_path / "inner")
    assert disk_acts.index(("fsync", file)) < disk_acts.index(("rename", file))
    after = disk_acts[disk_acts.index(("rename", file)) :]
    assert ("fsync", folder) in after and ("fsync", inode(tmp_path)) in after


def test_files_of_a_directory_that_exists_are_replaced_the_last_one_at_the_end(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("old")
    (tmp_path / "kept").write_text("kept")
    real, moved = os.replace, []
    monkeypatch.setattr(os, "replace", lambda *names: (moved.append(Path(names[1]).name), real(*names)))
    with atomic_directory(tmp_path, last="config.json") as unfinished:
        for name in ("config.json", "weights"):
            (unfinished / name).write_text("new")
    assert moved == ["weights", "config.json"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "config.json": "new",
        "weights": "new",
        "kept": "kept",
    }


def test_weights_are_as_readable_as_the_umask_allows_and_not_their_owner_s_alone(tmp_path):
    """safetensors makes its files 0600; a server often runs as somebody else."""
    (tmp_path / "plain").touch()
    with atomic_path(tmp_path / "heads.safetensors") as temporary:
        save_file({"a": torch.zeros(1)}, temporary)
    with atomic_directory(tmp_path / "export") as partial:
        save_file({"a": torch.zeros(1)}, partial / "model.safetensors")
    files = [tmp_path / name for name in ("plain", "heads.safetensors", "export/model.safetensors")]
    assert len({path.stat().st_mode for path in files}) == 1


@pytest.mark.parametrize("kind", ["file", "directory", "link to a directory", "dangling link", "named pipe", "nothing"])
def test_whatever_stands_there_is_removed_and_what_a_link_leads_to_is_left(tmp_path, kind):
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    if kind == "file":
        there.write_text("content")
    elif kind == "directory":
        (there / "of" / "folders").mkdir(parents=True)
    elif kind == "named pipe":
        os.mkfifo(there)  # which nobody writes: opening it would not end
    elif kind != "nothing":
        there.symlink_to(elsewhere if kind == "link to a directory" else tmp_path / "gone")
    remove(there)
    assert not os.path.lexists(there) and (elsewhere / "kept").read_text() == "kept"
