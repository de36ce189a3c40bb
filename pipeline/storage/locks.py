"""Locks on directories: one owner that may change the content, or any number of readers.

Locks are advisory `flock`s, which the kernel releases when the process ends. The lock file has a
line for each holder, only for error messages.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
from pathlib import Path

from pipeline.errors import EnvironmentFault


class Lock:
    """A lock on `path`, a file; not held before `share` or `own`, and free after `release`.

    Args:
        what: The held object as a noun phrase: "the train stage".
    """

    def __init__(self, path: Path, what: str):
        self.path, self.what = path, what
        self._itself = f"process {os.getpid()} on {socket.gethostname()}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", errors="replace")
        except OSError as error:
            problem = f"{what[0].upper()}{what[1:]} cannot be locked: {error.strerror}."
            fix = "Set run.root and run.store to places that you may write to."
            raise EnvironmentFault(problem, str(path), fix) from None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def share(self) -> None:
        """Hold it with other readers; an owner becomes one of them.

        Raises:
            EnvironmentFault: Another process owns it.
        """
        self._take(fcntl.LOCK_SH)
        self._write([*self._others(), self._itself])

    def own(self) -> None:
        """Hold it alone.

        Raises:
            EnvironmentFault: Another process owns or reads it.
        """
        self._take(fcntl.LOCK_EX)
        self._write([self._itself])

    def release(self) -> None:
        if not self._file.closed:
            with contextlib.suppress(OSError), self._file:
                self._write(self._others())

    def _take(self, kind: int) -> None:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            holders = ", ".join(self._holders()) or "an unknown process"
            self._file.close()
            where = f"{self.path}, held by {holders}"
            fix = "Wait for it or stop it, then run the same command again."
            raise EnvironmentFault(f"Another run holds {self.what}.", where, fix) from None
        except OSError as error:
            problem = f"The file system takes no lock: {error.strerror}."
            fix = "Put run.root and run.store where locks work (on NFS, with its lock daemon)."
            raise EnvironmentFault(problem, str(self.path), fix) from None

    def _holders(self) -> list[str]:
        """Return the holders in the file, without processes of this machine that have ended."""
        self._file.seek(0)
        holders = []
        for pid, host in re.findall(r"process (\d+) on (\S+)", self._file.read()):
            if host != socket.gethostname() or Path(f"/proc/{pid}").exists():
                holders.append(f"process {pid} on {host}")
        return holders

    def _others(self) -> list[str]:
        return [holder for holder in self._holders() if holder != self._itself]

    def _write(self, holders: list[str]) -> None:
        self._file.truncate(0)
        self._file.write("".join(f"{holder}\n" for holder in holders))
        self._file.flush()
