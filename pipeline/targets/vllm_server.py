"""Run vLLM's OpenAI server in a process group of its own, which ends with this process.

The server runs as `python -m pipeline.targets.vllm_server FLAGS`. A thread in it waits for the end
of its standard input, which ends when the caller closes it or ends itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

from pipeline.errors import EnvironmentFault
from pipeline.targets.own_process import environment
from pipeline.targets.spec import EngineArgs, last_line

LOOPBACK = "127.0.0.1"
SECONDS_BETWEEN_CHECKS = 0.2
STOPS_WITHIN = 8.0  # seconds
SERVER = "vllm.entrypoints.openai.api_server"  # `vllm serve` fails in the CPU build
RAISED = re.compile(r"(?<![\w`])[A-Z]\w*(?:Error|Exception): (.+)")
REFUSED = re.compile(
    r"(?:\b(?:Value error|Assertion failed), |\.py: error: )(.+?)(?: \[type=|$)", re.MULTILINE
)
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without a proxy


class Address(NamedTuple):
    """The host and port of a server."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The URL of the server, without a path."""
        return f"http://{self.host}:{self.port}"


def free_port() -> int:
    """Return a port of the loopback address on which nothing listens."""
    with socket.socket() as found:
        found.bind((LOOPBACK, 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def running_server(
    address: Address,
    flags: Sequence[str],
    log: IO[str],
    where: str,
    fix: str,
) -> Iterator[subprocess.Popen[bytes]]:
    """Context manager: run a vLLM server, and yield its process when it is ready.

    Args:
        address: Where it listens.
        flags: Its further command-line flags, see `server_flags`.
        log: The open file that gets its output.
        where, fix: Those of the error.

    Raises:
        EnvironmentFault: The server cannot start.
    """
    own = ["--host", address.host, "--port", str(address.port)]
    with tempfile.TemporaryDirectory(prefix="vllm-") as sockets:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *flags, *own],
            env=environment(sockets),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            while not is_healthy(address.url):
                if process.poll() is not None:
                    log.seek(0)
                    reason = failure_reason(log.read())
                    raise EnvironmentFault(
                        f"vLLM's server ended with status {process.returncode}: {reason}.",
                        where,
                        fix,
                    )
                time.sleep(SECONDS_BETWEEN_CHECKS)
            yield process
        finally:
            _stop_server(process)


def failure_reason(output: str) -> str:
    """Return the reason of the first refusal or exception in a server's output, else its last line.

    A refusal of an argument comes from argparse or pydantic. Later exceptions come from processes
    that waited for the first one.
    """
    raised = REFUSED.search(output) or RAISED.search(output)
    if raised:
        return last_line(raised[1])
    return last_line(output or "no output")


def _stop_server(process: subprocess.Popen[bytes]) -> None:
    """Ask a server to stop; after at most `STOPS_WITHIN` seconds, kill the processes left."""
    assert process.stdin
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOPS_WITHIN)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def is_healthy(url: str) -> bool:
    """Return whether the server at a URL answers health checks."""
    try:
        DIRECT.open(f"{url}/health", timeout=5).close()
        return True
    except OSError:  # no connection, or a status other than 200
        return False


def server_flags(arguments: EngineArgs) -> list[str]:
    """Convert engine arguments to command-line flags of vLLM's server; None values have no flag."""
    words = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is True:
            words.append(f"--{flag}")
        elif value is False:
            words.append(f"--no-{flag}")
        elif isinstance(value, str):
            words += [f"--{flag}", value]
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)]
        elif value is not None:
            words += [f"--{flag}", json.dumps(value)]
    return words


def _end_with_the_caller() -> None:
    """Wait for the end of standard input, then terminate all processes of the server.

    Nothing is written to it. A read of `sys.stdin` would abort Python if the server ends first.
    """
    os.read(sys.stdin.fileno(), 1)
    os.killpg(os.getpgrp(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
