"""Where archives lie: a directory of this machine, an object store, or whatever fsspec knows.

pyarrow reads `s3://`, `gs://`, `abfs://`, `hdfs://` and `file://`; its options stand in the address
(`s3://bucket/runs?region=…&endpoint_override=…`). Credentials come from the environment, never from the address, which
is printed. Every other scheme is fsspec's, where its library is installed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from pipeline.errors import ConfigError, DataError, EnvironmentFault
from pipeline.redact import redacted

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile, or the machine's role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "abfs": "AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_CLIENT_SECRET",
}
BLOCK = 8 * 1024**2  # bytes


@dataclass(frozen=True)
class Place:
    """A folder of a file system, under which an archive's objects lie by name."""

    address: str  # as the user names it
    system: fs.FileSystem
    root: str

    def path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def sizes(self, folder: str) -> dict[str, int]:
        """The size in bytes of every file below a folder, by name; empty where there is none."""
        with self.errors():
            chosen = fs.FileSelector(self.path(folder), allow_not_found=True, recursive=True)
            files = (file for file in self.system.get_file_info(chosen) if file.type == fs.FileType.File)
            return {file.path.removeprefix(f"{self.root}/"): file.size for file in files}

    def read(self, name: str) -> bytes | None:
        """A small file's content; None where there is no such file."""
        with self.errors():
            if self.system.get_file_info(self.path(name)).type != fs.FileType.File:
                return None
            with self.system.open_input_stream(self.path(name)) as file:
                return bytes(file.read())

    def blocks(self, name: str) -> Iterator[bytes]:
        """A file's content, block by block; FileNotFoundError as the cause where there is no such file."""
        with self.errors():
            if self.system.get_file_info(self.path(name)).type != fs.FileType.File:  # a pipe would be waited for
                raise FileNotFoundError(errno.ENOENT, "No such file", self.path(name))
        with self.errors(), self.system.open_input_stream(self.path(name)) as file:
            while block := file.read(BLOCK):
                yield block

    def write(self, name: str, blocks: Iterator[bytes]) -> None:
        """Make a file that is there whole or not at all."""
        path = self.path(name)
        local = isinstance(self.system, fs.LocalFileSystem)  # elsewhere an object appears with its last byte
        if local:
            self._stay_inside(path)
        with self.errors():
            if local or not isinstance(self.system, fs.S3FileSystem):
                self.system.create_dir(path.rpartition("/")[0], recursive=True)
            if local:  # a link in its place would be written through
                Path(f"{path}.tmp").unlink(missing_ok=True)
            with self.system.open_output_stream(f"{path}.tmp" if local else path) as file:
                for block in blocks:
                    file.write(block)
            if local:
                self.system.move(f"{path}.tmp", path)

    def _stay_inside(self, path: str) -> None:
        """Raise DataError where a link in the archive leads to another folder, which is not ours to write to."""
        folder = os.path.dirname(path)
        if not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(self.root)):
            raise DataError("A link leads out of the archive.", folder, "Delete it and archive the run again.")

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """What the file system refuses as one sentence."""
        try:
            yield
        except UnicodeError as error:  # pyarrow lists no folder that has one
            fix = "Delete it, or name a folder of its own; the same command continues."
            raise DataError("A file there has a name that is no UTF-8.", self.address, fix) from error
        except (OSError, pa.ArrowException) as error:
            raise EnvironmentFault(
                f"The archive cannot be reached: {_first_line(error)}.",
                self.address,
                f"{_fix(self.address)} What was copied is kept; the same command continues.",
            ) from error


def open_place(address: str) -> Place:
    """The place that an address names; `PATH`, `file://PATH`, or a URI.

    Raises:
        ConfigError: It holds a password, or nobody knows its scheme.
        EnvironmentFault: The library for it is not installed, or it cannot be reached.
    """
    parts = urlsplit(address)
    if not parts.scheme:  # no address, in which `#`, `?` and `%` would mean something
        return Place(address, fs.LocalFileSystem(), os.path.abspath(Path(address).expanduser()))
    if parts.password or "secret_key" in parts.query:
        shown = parts._replace(netloc=parts.hostname or "", query="").geturl()
        fix = "Leave it to the environment, where no message and no file repeats it."
        raise ConfigError("The address holds a password or a secret key.", shown, fix)
    try:
        system, root = fs.FileSystem.from_uri(address)
    except pa.ArrowInvalid as error:
        if "Unrecognized filesystem type" not in str(error):
            raise ConfigError(f"The address is not understood: {_first_line(error)}.", address) from None
        system, root = _by_fsspec(address)
    except (OSError, pa.ArrowException, ImportError) as error:
        raise EnvironmentFault(
            f"The archive's file system cannot be opened: {_first_line(error)}.", address, _fix(address)
        ) from error
    return Place(address, system, root.rstrip("/"))


def _by_fsspec(address: str) -> tuple[fs.FileSystem, str]:
    import fsspec

    try:
        system, root = fsspec.url_to_fs(address)
    except ImportError as error:
        raise EnvironmentFault(f"A library for this address is not installed: {_first_line(error)}.", address) from None
    except ValueError as error:
        fix = "It may be a path, file://, s3://, gs://, abfs://, hdfs://, or another that fsspec knows."
        raise ConfigError(f"The address has an unknown scheme: {_first_line(error)}.", address, fix) from None
    return fs.PyFileSystem(fs.FSSpecHandler(system)), root


def _fix(address: str) -> str:
    scheme = urlsplit(address).scheme
    if scheme in CREDENTIALS:
        return f"Check the address, the network, and the credentials ({CREDENTIALS[scheme]})."
    return "Check the address, and that you may write there."


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return redacted(lines[0])[:300].strip().rstrip(".")
