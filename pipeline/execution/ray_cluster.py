"""Start a Ray cluster for this process, or join the one that RAY_ADDRESS names, without a word of
Ray's own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray._private.services import (
    canonicalize_bootstrap_address,
)  # what `auto` means has no public name
from ray.util.client import ray as ray_client

from pipeline import OPENMP
from pipeline.errors import EnvironmentFault
from pipeline.execution.cluster_watch import SUBMITTED_JOB, refusal

CLIENT = "ray://"
WORKER_ENVIRONMENT = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
OBJECT_STORE_BYTES = 256 * 1024**2  # tasks and receipts only
QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}


def connect(address: str) -> None:
    """Connect this process to the cluster at RAY_ADDRESS, or where that is empty to one of its own.

    Raises:
        EnvironmentFault: Nobody listens there, or Ray does not start.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if address:
            require_listener(address)
        with own_signals():
            if address:
                ray.init(**QUIET, runtime_env={"env_vars": worker_environment()})
            else:
                start_cluster(len(os.sched_getaffinity(0)))
    except EnvironmentFault:
        raise
    except Exception as error:
        raise start_error(error, address) from None


def start_cluster(num_cpus: int) -> Any:
    """Start a cluster of this process's own, whose workers inherit their variables; return what
    `ray.init` does.

    With a runtime environment instead, Ray would not use the workers that it starts with the
    cluster, and would import itself twice in every other one.
    """
    with environment(WORKER_ENVIRONMENT):
        return ray.init(
            "local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **QUIET,
        )


def worker_environment() -> dict[str, str]:
    """Return the variables of workers on another cluster, without those of a submitted job: Ray
    refuses both.
    """
    variables = dict(WORKER_ENVIRONMENT)
    for name in OPENMP.keys() & os.environ.keys():
        variables[name] = os.environ[name]
    job = json.loads(os.environ.get(SUBMITTED_JOB) or "{}")
    for name in (job.get("runtime_env") or {}).get("env_vars", {}):
        variables.pop(name, None)
    return variables


def require_listener(address: str) -> None:
    """Raise EnvironmentFault unless somebody listens at RAY_ADDRESS."""
    reason = refusal(host_and_port(address))
    if reason:
        fix = (
            "Start the cluster (`ray start --head`), correct RAY_ADDRESS, or unset it to start one"
            " for this run."
        )
        raise EnvironmentFault(f"No Ray cluster answers at RAY_ADDRESS: {reason}.", address, fix)


def host_and_port(address: str) -> str:
    """Return where Ray connects to for a RAY_ADDRESS; raises ConnectionError where it is `auto` and
    no cluster runs.
    """
    if address.startswith(CLIENT):
        return address.removeprefix(CLIENT)

    return str(canonicalize_bootstrap_address(address))


def driver_needs(address: str) -> dict[str, str]:
    """Return the addresses of the processes that this driver cannot do without, by what they are
    called.
    """
    if ray_client.is_connected():
        return (
            {"its Ray Client server": host_and_port(address)} if address.startswith(CLIENT) else {}
        )
    context = ray.get_runtime_context()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    raylet = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    return {"its head": context.gcs_address, "its scheduler on this machine": raylet}


def start_error(error: Exception, address: str) -> EnvironmentFault:
    """Return why Ray did not start, and what to do about it."""
    reason = str(error).rstrip(".")
    fix = "Check RAY_ADDRESS and `ray status`, or run with --executor inline."
    if "AF_UNIX path length" in reason:
        fix = (
            "Set TMPDIR, or RAY_TMPDIR where it is set, to a path of at most 40 characters, such as"
            " /tmp."
        )
    return EnvironmentFault(f"Ray did not start: {reason}.", address or "a local cluster", fix)


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables that processes which are started meanwhile inherit."""
    kept = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(kept)


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Keep this process's signal handlers: Ray's handler of SIGTERM would end it without a
    message.
    """
    kept = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    stopped = False
    try:
        yield
    except SystemExit:
        stopped = True
    finally:
        if (
            threading.current_thread() is threading.main_thread()
        ):  # handlers can be set nowhere else
            for signum, handler in kept.items():
                signal.signal(signum, handler)
    if stopped:
        signal.raise_signal(signal.SIGTERM)
