"""Files and directories that are either whole or absent: temporary name, fsync, rename, fsync of the directory.

A file's temporary name is unique to its writer, so that an orphaned worker and the resumed run never write into the
same file; the last rename wins, with equal content. Leftovers end in `.tmp` and are removed on resume.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import stat
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import EnvironmentFault, MedusaDistillError

DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT}
ACCESS_ERRORS = {errno.EACCES, errno.EPERM, errno.EROFS}
UMASK = os.umask(0)  # which can only be read by setting it
os.umask(UMASK)
NO_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it becomes `path` durably, on failure it vanishes.

    Raises:
        EnvironmentFault: The disk is full. What was committed before is intact.
    """
    temporary = temporary_beside(path)
    try:
        with disk_errors(path):
            yield temporary
            publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(directory: Path, last: str = "") -> Iterator[Path]:
    """Yield an empty directory beside `directory`; on success its content is put there durably, on failure it vanishes.

    `directory` is made by one rename if it does not exist. If it does, its files are replaced one by one, the one named
    `last` at the end, and whoever owns it says when it is whole. There is one writer at a time.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    remove(partial)  # what a killed process left
    try:
        partial.mkdir(parents=True)
        yield partial
        files = files_in(partial)
        folders = {Path()}  # those whose entries change, relative to the directory
        for file in files:
            folders.update(file.parents)
            _make_readable(partial / file)
            sync(partial / file)
        if not directory.exists():
            for folder in folders:
                sync(partial / folder)
            os.replace(partial, directory)
        else:
            for file in sorted(files, key=lambda file: file.name == last):
                (directory / file).parent.mkdir(parents=True, exist_ok=True)
                os.replace(partial / file, directory / file)
            for folder in folders:
                sync(directory / folder)
        sync(directory.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def files_in(directory: Path) -> list[Path]:
    """Every file below `directory`, relative to it, by name."""
    return sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())


def remove(path: Path) -> None:
    """Remove what stands there, of whatever kind: a directory with all that is in it, but of a link the link alone.

    `shutil.rmtree` would wait for ever at a named pipe, and leave a link where it is.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_text(name: str) -> bool:
    """Whether a file's name is UTF-8 on the disk: what is not can be in no record."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def links_in(directory: Path, but_in: Collection[str] = ()) -> Iterator[Path]:
    """Every symbolic link below `directory`, but in folders of these names; none is followed."""
    for place, folders, files in os.walk(directory):
        yield from (path for name in (*folders, *files) if (path := Path(place, name)).is_symlink())
        folders[:] = [name for name in folders if name not in but_in]


def temporary_beside(path: Path) -> Path:
    """A name in the same directory that no other writer uses."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def publish(temporary: Path, path: Path) -> None:
    """Rename a finished temporary file to its name, durably."""
    _make_readable(temporary)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def _make_readable(path: Path) -> None:
    """Give a new file the access that the umask allows: safetensors makes its files their owner's alone."""
    with contextlib.suppress(OSError):  # of a file system without modes
        path.chmod(0o666 & ~UMASK)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn "no space left", "no access" and "is a directory" of any library into an EnvironmentFault.

    Some libraries report a full disk by exceptions other than OSError.
    """
    try:
        yield
    except MedusaDistillError:
        raise
    except Exception as error:
        if getattr(error, "errno", None) in DISK_ERRORS or "No space left" in str(error):
            raise EnvironmentFault(
                "The disk is full.",
                str(path),
                "Free some space and run the same command again: it continues where it stopped.",
            ) from error
        if getattr(error, "errno", None) in ACCESS_ERRORS:
            raise EnvironmentFault(
                f"A file cannot be opened or written: {error}.",
                str(path),
                "Give this user access to it, or set run.root to a place of its own; the same command then continues.",
            ) from error
        if isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError):
            what = f"A directory stands where a file belongs, or the other way round: {error}."
            raise EnvironmentFault(what, str(path), "Remove it, then run the same command again.") from error
        raise


def write_json(path: Path, data: Any) -> None:
    """Write JSON durably, piece by piece; the file is whole or as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        json.dump(data, file, indent=2, ensure_ascii=False, allow_nan=False)
        file.write("\n")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text durably; the file is whole or as it was. A lone surrogate becomes its escape `\\udXXX`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def open_file(path: Path) -> io.BufferedReader:
    """A regular file for reading; OSError for anything else, such as a pipe, which would be waited for."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "This is no regular file", str(path))
    return file


def read_file(path: Path) -> bytes:
    """The content of a regular file; raises as `open_file` does."""
    with open_file(path) as file:
        return file.read()


def read_json(path: Path) -> Any | None:
    """The file's JSON, or None where it is absent or damaged."""
    try:
        return json.loads(read_file(path).decode())
    except (OSError, ValueError, RecursionError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """The file's JSON object; empty where it is absent or damaged, or holds something else."""
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def sync(path: Path) -> None:
    """Make a file's content, or the renames in a directory, survive a power cut.

    Some network file systems have no fsync of a directory; there the renames are as durable as the server makes them.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FSYNC or not path.is_dir():
            raise
    finally:
        os.close(handle)


def sweep_temporary(directory: Path) -> int:
    """Remove the temporary files of killed writers; returns their number."""
    leftovers = [path for path in directory.rglob("*.tmp") if not path.is_dir()]
    for path in leftovers:
        path.unlink(missing_ok=True)
    return len(leftovers)
