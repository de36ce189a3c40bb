"""Whether a Ray cluster answers: asked before a driver connects, and again and again while it waits.

Ray itself waits for minutes for an address that nobody listens on, and ends a driver whose cluster has died without a
word and with exit code 1. Here both are an error for a person, within seconds.

Limit: of a cluster behind `ray://` (Ray Client) and of one that speaks TLS only the connection is tested.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.errors import EnvironmentFault

CLIENT = "ray://"
SECONDS_TO_ANSWER = 5.0
SECONDS_BETWEEN_LOOKS = 0.5
PATIENCE, PATIENCE_WITH_OTHERS = 1.0, 20.0  # seconds without an answer; a shared cluster's head may be restarted
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and empty settings
KEPT = "What was committed is kept; the same command continues."


def require_answer(address: str, resolved: str | None) -> None:
    """Refuse a cluster that does not answer.

    Args:
        address: What RAY_ADDRESS says.
        resolved: The host and port that Ray takes it for; None where it finds none.

    Raises:
        EnvironmentFault: Nobody listens there, or what listens is no Ray cluster.
    """
    fix = "Start the cluster (`ray start --head`), correct RAY_ADDRESS, or unset it to start one for this run."
    if resolved is None:
        raise EnvironmentFault("RAY_ADDRESS names a cluster, and none runs on this machine.", address, fix)
    reason = unanswered(resolved, greet=not (address.startswith(CLIENT) or os.environ.get("RAY_USE_TLS") == "1"))
    if reason:
        raise EnvironmentFault(f"No Ray cluster answers at RAY_ADDRESS: {reason}.", address, fix)


def unanswered(address: str, *, greet: bool) -> str | None:
    """Why no server is to be had at `host:port`; None where there is one.

    Args:
        greet: Whether it has to answer as a gRPC server does, whose first bytes are HTTP/2 settings.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_ANSWER) as line:
            if not greet:
                return None
            line.sendall(HTTP2_PREFACE)
            return None if line.recv(9)[3:4] == b"\x04" else "what listens there is no Ray cluster"
    except TimeoutError:
        return f"no answer in {SECONDS_TO_ANSWER:.0f} seconds"
    except (OSError, ValueError) as error:
        return (error.strerror if isinstance(error, OSError) else None) or str(error)


@dataclass
class Part:
    """A process that a driver cannot do without: how to ask whether it is there, and since when it does not answer."""

    name: str
    answers: Callable[[], bool]
    silent_since: float | None = None

    def look(self, patience: float) -> bool:
        """Whether it has been silent for longer than that."""
        if self.answers():
            self.silent_since = None
            return False
        self.silent_since = self.silent_since or time.monotonic()
        return time.monotonic() - self.silent_since >= patience


@dataclass
class ClusterWatch:
    """Asks the cluster's head and this machine's part of it whether they are still there.

    Args:
        gcs_address: Host and port of the head's control service (GCS).
        raylet_socket: The socket of this machine's scheduler (raylet); None where it is not known.
        own: Whether this process started the cluster, so that nobody restarts a part of it.
    """

    gcs_address: str
    raylet_socket: str | None
    own: bool
    gone: str = ""  # the part that has died
    _looked: float = field(default=0.0, repr=False)

    def __post_init__(self) -> None:
        self._parts = [Part(f"its head (the GCS at {self.gcs_address})", self._head_answers)]
        if self.raylet_socket:
            self._parts.append(Part("its scheduler on this machine (the raylet)", self._raylet_answers))

    def check(self) -> None:
        """Look, though not more often than twice a second.

        Raises:
            EnvironmentFault: A part of the cluster is gone for good.
        """
        if time.monotonic() - self._looked < SECONDS_BETWEEN_LOOKS:
            return
        self._looked = time.monotonic()
        patience = PATIENCE if self.own else PATIENCE_WITH_OTHERS
        self.gone = self.gone or next((part.name for part in self._parts if part.look(patience)), "")
        if self.gone:
            raise EnvironmentFault(f"The Ray cluster has died: {self.gone} does not answer any more.", "Ray", KEPT)

    def settle(self) -> None:
        """After something has failed that the cluster's own death explains: wait until it is known whether it has died.

        Raises:
            EnvironmentFault: It has.
        """
        self._looked = 0.0
        self.check()
        while any(part.silent_since for part in self._parts):
            time.sleep(SECONDS_BETWEEN_LOOKS)
            self.check()

    def _head_answers(self) -> bool:
        return unanswered(self.gcs_address, greet=False) is None

    def _raylet_answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            line.settimeout(SECONDS_TO_ANSWER)
            line.connect(self.raylet_socket or "")
            return True
        return False
