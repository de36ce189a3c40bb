"""Locks on directories: one owner that may change the content, or any number of readers.

Locks are advisory `flock`s, which the kernel releases when the process ends. The lock file's text names the holders,
for error messages.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.errors import EnvironmentFault


@dataclass(frozen=True)
class Holder:
    """Who holds a lock, as its file says."""

    pid: int
    host: str
    since: str
    id: str

    def may_live(self) -> bool:
        return self.host != socket.gethostname() or Path(f"/proc/{self.pid}").exists()


class Lock:
    """A lock on `path`, a file; not held before `share` or `own`, and free again after `release`.

    Args:
        what: What is held, as a sentence names it: "the train stage".
    """

    def __init__(self, path: Path, what: str):
        self.path, self.what = path, what
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            itself = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)  # no link to another's
            facts = os.fstat(itself)
            if not stat.S_ISREG(facts.st_mode):
                os.close(itself)
                raise OSError(errno.EINVAL, "this is no regular file")
            self._signs = facts.st_nlink == 1  # a hard link's text is another's file, too
            self._file = os.fdopen(itself, "a+", errors="replace")
        except OSError as error:
            fix = "Set run.root and run.store to places that you may write to."
            raise EnvironmentFault(
                f"{what[0].upper()}{what[1:]} cannot be locked: {error.strerror}.", str(path), fix
            ) from None
        self._signature = Holder(os.getpid(), socket.gethostname(), time.strftime("%F %T"), uuid.uuid4().hex[:8])

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def share(self) -> None:
        """Hold it with other readers; an owner becomes one of them.

        Raises:
            EnvironmentFault: Another living process owns it.
        """
        self._take(fcntl.LOCK_SH)
        self._sign([*self._others(), self._signature])

    def own(self) -> None:
        """Hold it alone.

        Raises:
            EnvironmentFault: Another living process owns or reads it.
        """
        self._take(fcntl.LOCK_EX)
        self._sign([self._signature])

    def release(self) -> None:
        if not self._file.closed:
            with contextlib.suppress(OSError), self._file:  # the signature is only for a message
                self._sign(self._others())

    def _take(self, kind: int) -> None:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            holders = ", ".join(f"process {other.pid} on {other.host}" for other in self._others())
            self._file.close()
            where = f"{self.path}, held by {holders or 'an unknown process'}"
            fix = "Wait for it or stop it, then run the same command again."
            raise EnvironmentFault(f"Another run holds {self.what}.", where, fix) from None
        except OSError as error:
            fix = "Put run.root and run.store on a file system with locks (on NFS, with its lock daemon)."
            raise EnvironmentFault(f"The file system takes no lock: {error.strerror}.", str(self.path), fix) from None

    def _others(self) -> list[Holder]:
        """The other holders in the file, without processes of this machine that have ended."""
        self._file.seek(0)
        signed = []
        for line in self._file:
            with contextlib.suppress(ValueError, TypeError):
                signed.append(Holder(**json.loads(line)))
        return [other for other in signed if other.id != self._signature.id and other.may_live()]

    def _sign(self, holders: list[Holder]) -> None:
        if not self._signs:
            return
        self._file.truncate(0)
        self._file.write("".join(json.dumps(asdict(holder)) + "\n" for holder in holders))
        self._file.flush()
