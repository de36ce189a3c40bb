"""Start a private Ray cluster or join the one at RAY_ADDRESS, and detect its death.

If nothing listens at an address, Ray retries for minutes. If the head node dies, Ray ends the
driver after a minute, with exit code 1 and no message. Here both raise `EnvironmentFault` within
seconds.

Limit: the test opens a connection and sends nothing, so a port where another program listens
passes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

import ray
from ray._private.services import canonicalize_bootstrap_address  # `auto` has no public name

from pipeline import OPENMP
from pipeline.errors import EnvironmentFault
from pipeline.targets.spec import last_line

WORKER_ENVIRONMENT = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
OBJECT_STORE_BYTES = 256 * 1024**2  # tasks and receipts only
QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
NO_CLUSTER = (
    "Start the cluster (`ray start --head`) and set RAY_ADDRESS to its host:port, or unset it to"
    " start a cluster for this run."
)
SECONDS_TO_CONNECT = 5.0
SECONDS_BETWEEN_TESTS = 0.5
PATIENCE, PATIENCE_WITH_OTHERS = 1.0, 20.0  # seconds; the head of a shared cluster may be restarted


def connect(address: str) -> None:
    """Connect to the Ray cluster at `address`, or start a private cluster if `address` is empty.

    Raises:
        EnvironmentFault: Nothing listens at `address`, or Ray does not start.
    """
    if address.startswith("ray://"):
        raise EnvironmentFault("RAY_ADDRESS is a Ray Client address.", address, NO_CLUSTER)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if address:
            reason = connection_error(str(canonicalize_bootstrap_address(address)))
            if reason:
                raise EnvironmentFault(
                    f"No Ray cluster answers at RAY_ADDRESS: {reason}.",
                    address,
                    NO_CLUSTER,
                )
        with own_signals():
            if address:
                variables = dict(WORKER_ENVIRONMENT)
                for name in OPENMP.keys() & os.environ.keys():
                    variables[name] = os.environ[name]
                ray.init(**QUIET, runtime_env={"env_vars": variables})
            else:
                start_cluster(len(os.sched_getaffinity(0)))
    except EnvironmentFault:
        raise
    except Exception as error:
        raise start_error(error, address) from None


def start_cluster(num_cpus: int) -> Any:
    """Start a private Ray cluster; return the context of `ray.init`.

    Workers inherit the driver's environment variables. With a runtime environment instead, Ray
    would discard the workers that start with the cluster, and import itself twice in every other
    worker.
    """
    for name, value in WORKER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return ray.init(
        "local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        **QUIET,
    )


def driver_needs() -> list[str]:
    """Return `host:port` of the head and of this node's raylet, which this driver depends on."""
    context = ray.get_runtime_context()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    raylet = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    return [context.gcs_address, raylet]


def connection_error(address: str) -> str | None:
    """Return why a Ray process at `host:port` accepts no connection; None if it accepts one."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_CONNECT).close()
    except (OSError, ValueError, OverflowError) as error:
        return str(error)
    return None


class ClusterWatch:
    """Detector of the death of Ray processes that this driver needs.

    Args:
        addresses: `host:port` of each process.
        patience: Seconds without a connection after which a process counts as dead.
    """

    def __init__(self, addresses: Collection[str], patience: float):
        self.addresses, self.patience = addresses, patience
        self.is_dead = False
        self._silent_since: float | None = None

    def check(self) -> None:
        """Raise EnvironmentFault if a Ray process accepts no connection for `patience` seconds."""
        now = time.monotonic()
        silent = list(filter(connection_error, self.addresses))
        if not silent:
            self._silent_since = None
            return
        if self._silent_since is None:
            self._silent_since = now
        if now - self._silent_since >= self.patience:
            self.is_dead = True
            raise EnvironmentFault(
                f"The Ray cluster has died: {silent[0]} does not answer.",
                "Ray",
                "What was committed is kept; the same command continues.",
            )

    def settle(self) -> None:
        """Wait until the Ray cluster is known to be alive or dead; raise as `check` does."""
        self.check()
        while self._silent_since is not None:
            time.sleep(SECONDS_BETWEEN_TESTS)
            self.check()


def start_error(error: Exception, address: str) -> EnvironmentFault:
    """Return the EnvironmentFault for an error that Ray raised when it started."""
    return EnvironmentFault(
        f"Ray did not start: {last_line(error)}.",
        address or "a local cluster",
        "Check RAY_ADDRESS, `ray status`, and that TMPDIR and RAY_TMPDIR have at most 40"
        " characters, or run with --executor inline.",
    )


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Context manager that keeps this process's signal handlers while Ray starts.

    Ray's handler of SIGTERM would end the process without a message. A SIGTERM that arrives
    meanwhile is passed to the kept handler afterwards.
    """
    kept = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    stopped = False
    try:
        yield
    except SystemExit:  # raised by Ray's handler; the caller's handler gets the signal below
        stopped = True
    finally:
        if threading.current_thread() is threading.main_thread():  # other threads may not
            for signum, handler in kept.items():
                signal.signal(signum, handler)
    if stopped:
        signal.raise_signal(signal.SIGTERM)
