"""A directory that is either whole or absent: written under another name, flushed, and put in place at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pipeline.export.layout import CONFIG_FILE


@contextlib.contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """Yield an empty directory to write into; what is in it at the end is put at `directory`, on failure nothing.

    `directory` is made by one rename if it does not exist. If it does, its files are replaced one by one, the
    configuration last, and whoever owns it says when it is whole.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
    try:
        partial.mkdir(parents=True)
        yield partial
        _put_in_place(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def files_in(directory: Path) -> list[Path]:
    """Every file below `directory`, relative to it, by name."""
    return sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())


def _put_in_place(partial: Path, directory: Path) -> None:
    files = files_in(partial)
    for file in files:
        _flush(partial / file)
    if not directory.exists():
        os.replace(partial, directory)
    else:
        for file in sorted(files, key=lambda file: file.name == CONFIG_FILE):
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial / file, directory / file)
        _flush(directory)
    _flush(directory.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
