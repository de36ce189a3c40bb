"""Atomic writes of files and directories: temporary name, fsync, rename, fsync of the directory.

A write is durable: it survives a power failure once the function has returned. A file's temporary
name is unique to its writer, so that two writers never write into the same file; the last rename
wins. A killed writer leaves a file that ends in `.tmp`, which the resumed run removes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import EnvironmentFault, MedusaDistillError

JsonObject = dict[str, Any]

FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # EFBIG: `ulimit -f`, or FAT32's limit
FAILED_ERRORS = {errno.EIO, errno.ESTALE}  # ESTALE: a network file system has lost the file
REFUSED_ERRORS = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
}
UMASK = os.umask(0)  # which can only be read by setting it
os.umask(UMASK)
NO_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}
AGAIN = "run the same command again: it continues where it stopped."


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Context manager: yield a temporary path, and rename it to `path` on success.

    After an exception, the temporary file is removed; `path` is never half-written.

    Raises:
        EnvironmentFault: The disk is full or fails, or the file may not be written.
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
    """Context manager: yield an empty directory, and move its files to `directory` on success.

    If `directory` does not exist, this is one rename. Otherwise the files are moved one by one, a
    file named `last` at the end, and other files of `directory` stay. There must be only one writer
    at a time.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    remove(partial)  # of a killed process
    try:
        partial.mkdir(parents=True)
        yield partial
        files = files_in(partial)
        folders = {Path()}  # whose entries change, relative to the directory
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
    """Return the relative paths of all files below a directory, sorted."""
    return sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())


def remove(path: Path) -> None:
    """Remove a file, a link, or a directory with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def temporary_beside(path: Path) -> Path:
    """Return a unique path for a temporary file in the directory of `path`."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def publish(temporary: Path, path: Path) -> None:
    """Rename a temporary file to `path` durably; the file gets the default mode."""
    _make_readable(temporary)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def _make_readable(path: Path) -> None:
    """Set a file's mode to the default, 0666 without the umask; safetensors writes with 0600."""
    with contextlib.suppress(OSError):  # of a file system without modes
        path.chmod(0o666 & ~UMASK)


@contextlib.contextmanager
def disk_errors(path: Path | None = None) -> Iterator[None]:
    """Context manager that converts disk errors to EnvironmentFault (see `disk_fault`).

    Other errors are not changed.
    """
    try:
        yield
    except MedusaDistillError:
        raise
    except Exception as error:
        fault = disk_fault(error, path)
        if fault is None:
            raise
        raise fault from error


def disk_fault(error: BaseException, path: Path | None = None) -> EnvironmentFault | None:
    """Return the EnvironmentFault for a full disk, a failing file system or a refused access.

    It is None for any other error. Errors of libraries that carry no errno are recognized by their
    messages.

    Args:
        path: The file that was written or read; by default the one that the error names.
    """
    where = path or getattr(error, "filename", None) or "the file system"
    number = _disk_errno(error)
    if number in FULL_ERRORS:
        return EnvironmentFault(
            "The disk is full.",
            where,
            f"Free some space (or raise `ulimit -f`) and {AGAIN}",
        )
    if number in FAILED_ERRORS:
        return EnvironmentFault(
            f"The file system fails: {error}.",
            where,
            f"Repair the disk or its connection (see `dmesg`) and {AGAIN}",
        )
    if number in REFUSED_ERRORS:
        return EnvironmentFault(
            f"A file cannot be opened or written: {error}.",
            where,
            f"Check the path and its permissions, or set run.root to another directory; {AGAIN}",
        )
    return None


def free_disk(path: Path) -> int:
    """Return the number of free bytes on the disk of `path`, which need not exist yet."""
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free


def require_free_disk(path: Path, least_gb: float) -> None:
    """Raise EnvironmentFault if less than `least_gb` GB (10^9 bytes) of the disk is free."""
    free = free_disk(path) / 1e9
    if free < least_gb:
        raise EnvironmentFault(
            f"The disk has {free:.1f} GB left, less than limits.min_free_disk_gb = {least_gb}.",
            path,
            "Free some space and run the same command again: it continues where it stopped.",
        )


def _disk_errno(error: BaseException) -> int | None:
    """Return the errno of a full disk if an error in the chain of causes has it, else its own.

    It is None if there is neither.
    """
    cause: BaseException | None = error
    while cause:
        number = _own_errno(cause)
        if number in FULL_ERRORS:
            return number
        cause = cause.__cause__ or cause.__context__
    return _own_errno(error)


def _own_errno(error: BaseException) -> int | None:
    """Return an error's errno, or the one whose text its message contains; None if neither."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    for number in (*FULL_ERRORS, *FAILED_ERRORS):
        if os.strerror(number) in str(error):
            return number
    return None


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file atomically and durably; create missing parent directories.

    Raises:
        ValueError: `data` holds a number that is not finite.
        EnvironmentFault: As `atomic_path` does.
    """
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, f"{text}\n")


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically and durably; create missing parent directories.

    A lone surrogate becomes its escape, such as `\\ud83d`.

    Raises:
        EnvironmentFault: As `atomic_path` does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def read_file(path: Path) -> bytes:
    """Return the bytes of a file.

    Raises:
        EnvironmentFault: The file system fails (EIO or ESTALE), so the content is unknown.
        OSError: The file is absent, or cannot be read for another reason.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        fault = disk_fault(error, path)
        if fault is None or error.errno not in FAILED_ERRORS:
            raise
        raise fault from error


def read_json(path: Path) -> Any | None:
    """Return the value in a JSON file; None if the file is absent, unreadable or not JSON.

    Raises:
        EnvironmentFault: The file system fails.
    """
    try:
        return json.loads(read_file(path).decode())
    except (OSError, ValueError, RecursionError):
        return None


def read_object(path: Path) -> JsonObject:
    """Return the object in a JSON file; empty if the file is absent, unreadable or has no object.

    Raises:
        EnvironmentFault: The file system fails.
    """
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk.

    If the file system cannot flush directories, a directory is skipped.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FSYNC or not path.is_dir():
            raise
    finally:
        os.close(handle)


def sweep_temporary(directory: Path) -> None:
    """Remove all temporary files (`*.tmp`) below a directory, which killed writers have left."""
    for path in list(directory.rglob("*.tmp")):
        path.unlink(missing_ok=True)
