"""Measure latencies of vLLM's OpenAI server under a load of concurrent requests.

The server listens on the loopback address. It runs as `python -m pipeline.targets.vllm_server
FLAGS` in a process group of its own, and ends with the process that started it: a thread waits for
the end of its standard input.

Requests are sent and timed by the client of vLLM's own benchmark (`vllm bench serve`) at a fixed
concurrency: when a request ends, the next one is sent. The client does not see the steps of a
request. So the acceleration rate is the number of generated tokens, without the first one of each
answer (from the prefill), divided by the number of drafts that the server has counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
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
from dataclasses import dataclass
from itertools import cycle, islice
from typing import IO

from pipeline.conversations.requests import Request
from pipeline.errors import EnvironmentFault
from pipeline.targets.loading import require_gpus
from pipeline.targets.own_process import Report, environment, in_own_process
from pipeline.targets.spec import EngineArgs, TargetSpec, eos_token_ids, last_line
from pipeline.targets.vllm_decode import DecodeTask
from pipeline.targets.vllm_engine import engine_arguments, import_vllm

HOST = "127.0.0.1"
NAME = "served"  # the model's name in requests
SECONDS_BETWEEN_CHECKS = 0.2
STOPS_WITHIN = 10.0  # seconds
SERVER = "vllm.entrypoints.openai.api_server"  # `vllm serve` fails in the CPU build
ROUNDS = 2  # least number of requests per concurrent request
WHERE = "check.studies: load"
FIX = "Take load out of check.studies."


@dataclass(frozen=True)
class LoadTask(DecodeTask):
    """The prompts and load levels for one vLLM server.

    A level is a number of concurrent requests. Prompts repeat in order until there are at least
    `ROUNDS` requests per concurrent request. A pass measures all levels one after another, and
    there are `repeats` passes. So other work on the machine disturbs one pass of several levels
    rather than all passes of one level. The result of a level is the pass with the median duration.
    """

    levels: Sequence[int] = ()


@dataclass(frozen=True)
class LoadFigures:
    """The figures of one vLLM server at one load level.

    Attributes:
        requests: The number of concurrent requests.
        seconds: The duration of all requests together.
        num_tokens: The number of tokens in all answers.
        ttft: The seconds to the first token of each request.
        tpot: The seconds per further token of each request; None for an answer of one token.
        acceleration_rate: Tokens per step after the prefill; None if the server does not draft.
    """

    requests: int
    seconds: float
    num_tokens: int
    ttft: Sequence[float]
    tpot: Sequence[float | None]
    acceleration_rate: float | None


def serve_under_load(
    tasks: Sequence[LoadTask], on_report: Report | None = None
) -> list[list[LoadFigures]]:
    """Measure one vLLM server for each task; return the figures of each task's load levels.

    Servers run one after another. Texts are greedy and end at the target's own EOS ids. Prefixes
    are not cached.

    Raises:
        ConfigError: As `engine_arguments` does.
        EnvironmentFault: vLLM is not importable, GPUs are missing, the server cannot start, or
            requests fail.
    """
    return [in_own_process(measure_server, task, on_report) for task in tasks]


def measure_server(task: LoadTask, report: Report) -> list[LoadFigures]:
    """Start a vLLM server, and measure it at each load level of the task.

    The figures of a level are those of the pass with the median duration.
    """
    import_vllm()
    side = "vLLM's server with the heads" if task.engine_args else "vLLM's server"
    report(part=f"{side} starts")
    eos = eos_token_ids(task.spec)
    questions = task.requests()
    passes: dict[int, list[LoadFigures]] = {level: [] for level in task.levels}
    loads = [*task.levels] * task.repeats
    arguments = {**task.engine_args, "enable_prefix_caching": False}
    with running_server(task.spec, arguments, task.gpus) as address:
        for turn, level in enumerate(loads):
            note = f"{level} requests at once"
            report(part=side, done=turn, total=len(loads), unit="loads", note=note)
            num_requests = max(len(questions), ROUNDS * level)
            requests = list(islice(cycle(questions), num_requests))
            passes[level].append(asyncio.run(_benchmark_server(address, requests, level, eos)))
    rows = []
    for of_level in passes.values():
        by_length = sorted(of_level, key=lambda figures: figures.seconds)
        rows.append(by_length[(len(by_length) - 1) // 2])
    return rows


async def _benchmark_server(
    address: str, requests: Sequence[Request], level: int, eos: Sequence[int]
) -> LoadFigures:
    """Measure a vLLM server with vLLM's benchmark client, after a warm-up.

    Args:
        requests: The requests that are timed.
        level: The number of concurrent requests.
        eos: The token ids that end a text.

    Raises:
        EnvironmentFault: Requests fail.
    """
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark

    samples = []
    for request in requests:
        ids = request.prompt_ids
        samples.append(SampleRequest(ids, len(ids), request.max_new_tokens))
    result = await benchmark(
        task_type=TaskType.GENERATION,
        endpoint_type="openai",
        api_url=f"{address}/v1/completions",
        base_url=address,
        model_id=NAME,
        model_name=NAME,
        tokenizer=None,
        input_requests=samples,
        logprobs=None,
        request_rate=math.inf,
        burstiness=1.0,
        disable_tqdm=True,
        num_warmups=level,
        profile=False,
        selected_percentile_metrics=[],
        selected_percentiles=[],
        ignore_eos=True,  # stop_token_ids are the target's own
        goodput_config_dict={},
        max_concurrency=level,
        lora_modules=None,
        extra_headers=None,
        extra_body={"temperature": 0, "stop_token_ids": list(eos)},
    )
    if result["failed"]:
        reason = last_line("\n".join(result["errors"]))
        raise EnvironmentFault(
            f"{result['failed']} requests to vLLM's server failed: {reason}",
            WHERE,
            FIX,
        )
    tpot: list[float | None] = []
    answers = zip(result["ttfts"], result["latencies"], result["output_lens"], strict=True)
    for ttft, latency, num_tokens in answers:
        num_further = num_tokens - 1
        tpot.append((latency - ttft) / num_further if num_further else None)
    num_tokens = result["total_output_tokens"]
    num_drafts = result.get("spec_decode_num_drafts")
    rate = None
    if num_drafts:
        # Each answer's first token comes from the prefill, all others from verified drafts.
        rate = (num_tokens - len(requests)) / num_drafts
    return LoadFigures(level, result["duration"], num_tokens, result["ttfts"], tpot, rate)


@contextlib.contextmanager
def running_server(spec: TargetSpec, engine_args: EngineArgs, gpus: int) -> Iterator[str]:
    """Context manager: run a vLLM server, and yield its address when it is ready.

    Raises:
        ConfigError: As `engine_arguments` does.
        EnvironmentFault: The server cannot start, or GPUs are missing.
    """
    require_gpus(gpus)
    with socket.socket() as found:
        found.bind((HOST, 0))
        port = found.getsockname()[1]  # a free port
    arguments = {
        **engine_arguments(spec, engine_args, gpus),
        "served_model_name": NAME,
        "host": HOST,
        "port": port,
        "uvicorn_log_level": "error",
        "skip_tokenizer_init": None,
    }
    address = f"http://{HOST}:{port}"
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *server_flags(arguments)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            _wait_until_ready(process, address, log)
            yield address
        finally:
            _stop_server(process)


def _wait_until_ready(process: subprocess.Popen[bytes], address: str, log: IO[str]) -> None:
    """Wait until a server answers health checks; raise EnvironmentFault if its process ends."""
    while not is_healthy(address):
        if process.poll() is not None:
            log.seek(0)
            reason = last_line(log.read() or "no output")
            raise EnvironmentFault(
                f"vLLM's server ended with status {process.returncode}: {reason}",
                WHERE,
                FIX,
            )
        time.sleep(SECONDS_BETWEEN_CHECKS)


def _stop_server(process: subprocess.Popen[bytes]) -> None:
    """Ask a server to stop; after at most `STOPS_WITHIN` seconds, kill the processes left."""
    assert process.stdin
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOPS_WITHIN)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def is_healthy(address: str) -> bool:
    """Return whether the server at an address answers health checks."""
    try:
        urllib.request.urlopen(f"{address}/health", timeout=5).close()
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
        elif value is not None:
            words += [f"--{flag}", json.dumps(value)]
    return words


def _end_with_the_caller() -> None:
    """Wait for the end of standard input, then terminate all processes of the server.

    Standard input ends when the caller closes it or ends itself.
    """
    sys.stdin.buffer.read()
    os.killpg(os.getpgrp(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
