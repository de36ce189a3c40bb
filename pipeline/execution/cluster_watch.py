"""Test whether a Ray cluster accepts connections: before a driver connects to it, and while the
driver waits.

Ray itself tries for minutes where nobody listens, and ends a driver whose cluster's head has died
after a minute, with exit code 1 and no message. Here both are an `EnvironmentFault` within seconds.

Limit: a connection is opened and nothing is said, so a port where something else listens passes.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping

from pipeline.errors import EnvironmentFault

SUBMITTED_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray in a submitted job's entry point
SECONDS_TO_CONNECT = 5.0
SECONDS_BETWEEN_TESTS = 0.5
PATIENCE, PATIENCE_WITH_OTHERS = 1.0, 20.0  # seconds; the head of a shared cluster may be restarted


def refusal(address: str) -> str | None:
    """Return why `host:port` takes no connection; None where it takes one."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_CONNECT).close()
    except (OSError, ValueError, OverflowError) as error:
        return str(error)
    return None


class ClusterWatch:
    """Tests the processes of a cluster that a driver cannot do without.

    Args:
        addresses: `host:port` of each process, by what it is called.
        patience: A process is dead after so many seconds without a connection.
    """

    def __init__(self, addresses: Mapping[str, str], patience: float):
        self.addresses, self.patience = addresses, patience
        self.is_dead = False
        self._tested = -math.inf
        self._silent_since: float | None = None

    def check(self) -> None:
        """Test the processes, though not more often than twice a second; raises as `test` does."""
        if time.monotonic() - self._tested >= SECONDS_BETWEEN_TESTS:
            self.test()

    def settle(self) -> None:
        """Wait until the cluster is known to be alive or dead, after an error that its death would
        explain.
        """
        self.test()
        while self._silent_since is not None:
            time.sleep(SECONDS_BETWEEN_TESTS)
            self.test()

    def test(self) -> None:
        """Raise EnvironmentFault if a process has not answered for longer than `patience`."""
        now = self._tested = time.monotonic()
        silent = [
            f"{name} at {address}" for name, address in self.addresses.items() if refusal(address)
        ]
        if not silent:
            self._silent_since = None
            return
        if self._silent_since is None:
            self._silent_since = now
        if now - self._silent_since >= self.patience:
            self.is_dead = True
            fix = "What was committed is kept; the same command continues."
            raise EnvironmentFault(
                f"The Ray cluster has died: {silent[0]} does not answer.", "Ray", fix
            )
