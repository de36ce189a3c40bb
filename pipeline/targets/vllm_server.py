"""vLLM's own OpenAI server on this machine's loopback, for as long as it is measured.

It is started as `python -m pipeline.targets.vllm_server FLAGS`, in a process group of its own, and
ends with whoever started it, however that ends: a thread waits for the end of its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import IO, Any

from pipeline.errors import EnvironmentFault
from pipeline.targets.loading import require_gpus
from pipeline.targets.own_process import environment, last_line
from pipeline.targets.spec import TargetSpec
from pipeline.targets.vllm_engine import engine_arguments

HOST, NAME = "127.0.0.1", "served"  # the name that requests give the model
READY_EVERY, STARTS_WITHIN, STOPS_WITHIN = 0.2, 3600, 10  # seconds
SERVER = "vllm.entrypoints.openai.api_server"  # `vllm serve` of the CPU build fails, this does not


@contextlib.contextmanager
def serving(spec: TargetSpec, engine_args: Mapping[str, Any], gpus: int) -> Iterator[str]:
    """The address of a server of this target, which has ended when the block does.

    Raises:
        ConfigError: As `engine_arguments` does.
        EnvironmentFault: It cannot start, or not within an hour, or GPUs are missing.
    """
    require_gpus(gpus)
    arguments = engine_arguments(spec, engine_args, gpus) | {
        "served_model_name": NAME,
        "host": HOST,
    }
    arguments |= {"port": free_port(), "uvicorn_log_level": "error", "skip_tokenizer_init": None}
    command = [sys.executable, "-m", __name__, *flags(arguments)]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command,
            env=environment() | quiet,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            address, started = f"http://{HOST}:{arguments['port']}", time.monotonic()
            while not answers(address):
                if process.poll() is not None:
                    raise _no_server(f"ended with status {process.returncode}", log)
                if time.monotonic() - started > STARTS_WITHIN:
                    raise _no_server(
                        f"has not answered within {STARTS_WITHIN / 60:.0f} minutes", log
                    )
                time.sleep(READY_EVERY)
            yield address
        finally:
            _stop(process)


def _no_server(why: str, log: IO[str]) -> EnvironmentFault:
    log.seek(0)
    what = f"vLLM's server {why}: {last_line(log.read())}"
    return EnvironmentFault(what, "check.studies: load", "Take load out of check.studies.")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and the engines that it has started."""
    assert process.stdin
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOPS_WITHIN)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def answers(address: str) -> bool:
    """Whether the server is ready."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as the server's command line has them; None is left out."""
    found: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            found += [
                f"--{flag}",
                json.dumps(value) if isinstance(value, dict | list) else str(value),
            ]
    return found


def _end_with_the_caller() -> None:
    sys.stdin.buffer.read()
    os.killpg(os.getpgrp(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
