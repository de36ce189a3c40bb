"""Locks on directories: one owner that may change the content, or any number of readers.

Locks are advisory `flock`s, which the kernel releases when the process ends. The lock file
names the last owner and every holder since, only for error messages.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from pathlib import Path

from pipeline.errors import EnvironmentFault
from pipeline.storage.atomic import disk_errors


class Lock:
    """A file lock on a run or stage directory, held from `share` or `own` until `release`.

    Args:
        path: The lock file, which is created if it is missing.
        what: The locked object in error messages, such as "the train stage".

    Raises:
        EnvironmentFault: The lock file cannot be opened.
    """

    def __init__(self, path: Path, what: str):
        self.path, self.what = path, what
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", errors="replace")

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def share(self) -> None:
        """Take the lock as one of several readers; an owner becomes a reader.

        Raises:
            EnvironmentFault: Another process owns the lock, or the file system has no locks.
        """
        self._take_lock(fcntl.LOCK_SH)
        self._add_holder()

    def own(self) -> None:
        """Take the lock as its only holder; a reader becomes the owner.

        Raises:
            EnvironmentFault: Another process holds the lock, or the file system has no locks.
        """
        self._take_lock(fcntl.LOCK_EX)
        self._file.truncate(0)
        self._add_holder()

    def release(self) -> None:
        """Release the lock, which cannot be taken again through this object."""
        self._file.close()

    def _take_lock(self, kind: int) -> None:
        """Take the lock without waiting.

        Args:
            kind: `fcntl.LOCK_SH` or `fcntl.LOCK_EX`.

        Raises:
            EnvironmentFault: Another process holds the lock, or the file system has no locks. In
                the first case, this object's lock file is closed.
        """
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            holders = ", ".join(self._holders()) or "an unknown process"
            self._file.close()
            raise EnvironmentFault(
                f"Another run holds {self.what}.",
                f"{self.path}, held by {holders}",
                "Wait for it or stop it, then run the same command again.",
            ) from None
        except OSError as error:
            raise EnvironmentFault(
                f"The file system takes no lock: {error.strerror}.",
                str(self.path),
                "Put run.root and run.store where locks work (on NFS, with its lock daemon).",
            ) from None

    def _holders(self) -> list[str]:
        """Return the other holders that the lock file names, such as `process 12 on HOST`.

        Processes of this machine that have ended are left out.
        """
        self._file.seek(0)
        holders = []
        for pid, host in re.findall(r"process (\d+) on (\S+)", self._file.read()):
            holder = f"process {pid} on {host}"
            is_alive = host != socket.gethostname() or Path(f"/proc/{pid}").exists()
            if is_alive and pid != str(os.getpid()) and holder not in holders:
                holders.append(holder)
        return holders

    def _add_holder(self) -> None:
        """Append this process to the lock file's list of holders."""
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()
