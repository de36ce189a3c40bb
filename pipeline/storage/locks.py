"""Who works in a directory: one owner who may change it, or any number of readers who rely on it.

The locks are advisory `flock`s: the kernel drops one with its process, so a dead holder never blocks. The lock file's
text only says who holds it, for the message that others get.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from pipeline.errors import EnvironmentFault


class Lock:
    """A lock on `path`, a file; not held before `share` or `own`, and free again after `release`.

    Args:
        what: What is held, as a sentence names it: "the train stage".
    """

    def __init__(self, path: Path, what: str):
        self.path, self.what = path, what
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+")
        except OSError as error:
            fix = "Set run.root and run.store to places that you may write to."
            raise EnvironmentFault(
                f"{what[0].upper()}{what[1:]} cannot be locked: {error.strerror}.", str(path), fix
            ) from None
        now = time.strftime("%F %T")
        self._signature = {"pid": os.getpid(), "host": socket.gethostname(), "since": now, "id": uuid.uuid4().hex[:8]}

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
        """Hold it no longer."""
        if not self._file.closed:
            with contextlib.suppress(OSError), self._file:  # the signature is only for a message
                self._sign(self._others())

    def _take(self, kind: int) -> None:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            holders = ", ".join(f"process {other['pid']} on {other['host']}" for other in self._others())
            self._file.close()
            where = f"{self.path}, held by {holders or 'an unknown process'}"
            fix = "Wait for it or stop it, then run the same command again."
            raise EnvironmentFault(f"Another run holds {self.what}.", where, fix) from None
        except OSError as error:
            fix = "Put run.root and run.store on a file system with locks (on NFS, with its lock daemon)."
            raise EnvironmentFault(f"The file system takes no lock: {error.strerror}.", str(self.path), fix) from None

    def _others(self) -> list[dict[str, Any]]:
        """Who else has signed, less those of this machine who are dead."""
        self._file.seek(0)
        signed = []
        for line in self._file:
            with contextlib.suppress(ValueError):
                signed.append(json.loads(line))
        signed = [holder for holder in signed if isinstance(holder, dict) and self._signature.keys() <= holder.keys()]
        return [other for other in signed if other["id"] != self._signature["id"] and _may_live(other)]

    def _sign(self, holders: list[dict[str, Any]]) -> None:
        self._file.truncate(0)
        self._file.write("".join(json.dumps(holder) + "\n" for holder in holders))
        self._file.flush()


def _may_live(holder: dict[str, Any]) -> bool:
    return holder["host"] != socket.gethostname() or Path(f"/proc/{holder['pid']}").exists()
