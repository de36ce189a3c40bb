"""Measure latencies of vLLM's OpenAI server under a load of concurrent requests.

The server runs on this machine's loopback, as `python -m pipeline.targets.vllm_server FLAGS`, in a
process group of its own. The server always ends with the process that started it: a thread waits
for the end of its standard input.

Requests are sent and timed by the client of vLLM's own benchmark (`vllm bench serve`) at a fixed
concurrency: a request is sent when another ends. The client does not see a request's steps. The
acceleration rate is the number of tokens after each answer's first one, which the prefill yields,
divided by the number of drafts that the server has counted.
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
from pipeline.targets.own_process import Report, environment, in_own_process, last_line
from pipeline.targets.spec import EngineArgs, TargetSpec, eos_token_ids
from pipeline.targets.vllm_decode import DecodeTask
from pipeline.targets.vllm_engine import engine_arguments, import_vllm

HOST = "127.0.0.1"
NAME = "served"  # the model's name in requests
SECONDS_BETWEEN_LOOKS = 0.2
STOPS_WITHIN = 10.0  # seconds
SERVER = "vllm.entrypoints.openai.api_server"  # `vllm serve` fails in the CPU build
ROUNDS = 2  # least number of requests per concurrent request
WHERE = "check.studies: load"
FIX = "Take load out of check.studies."


@dataclass(frozen=True)
class LoadTask(DecodeTask):
    """The prompts and load levels of one vLLM server.

    A level is a number of concurrent requests. Prompts repeat in order until there are at least
    `ROUNDS` requests per concurrent request. All levels are measured `repeats` times in turns, and
    each level reports its pass of median duration. So other work on the machine disturbs one pass
    of several levels rather than all passes of one level.
    """

    levels: Sequence[int] = ()


@dataclass(frozen=True)
class LoadFigures:
    """The figures of one vLLM server at one load level.

    Attributes:
        requests: The number of concurrent requests.
        seconds: The duration of all requests together.
        num_tokens: The number of tokens in all answers.
        ttft: Seconds to the first token, per request.
        tpot: Seconds per further token, per request; None for an answer of one token.
        acceleration_rate: None without drafts.
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
    """Start a vLLM server of the target per task, measure it, and return figures per load level.

    Prefixes are not cached. Texts are greedy and end at the target's own EOS ids.

    Raises:
        ConfigError: As `engine_arguments` does.
        EnvironmentFault: vLLM is not importable, GPUs are missing, the server cannot start, or
            requests fail.
    """
    return [in_own_process(measure_server, task, on_report) for task in tasks]


def measure_server(task: LoadTask, report: Report) -> list[LoadFigures]:
    """Run the target's vLLM server under the task's loads; return each level's median pass."""
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
    """Measure the target's vLLM server with vLLM's benchmark client, after a warm-up.

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
        what = f"{result['failed']} requests to vLLM's server failed: {reason}"
        raise EnvironmentFault(what, WHERE, FIX)
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
    """Context manager: run a vLLM server of the target; yield its address once it is ready.

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
    """Wait until the vLLM server answers health checks; raise EnvironmentFault if it ends."""
    while not is_healthy(address):
        if process.poll() is not None:
            log.seek(0)
            reason = f"status {process.returncode}: {last_line(log.read())}"
            raise EnvironmentFault(f"vLLM's server ended with {reason}", WHERE, FIX)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _stop_server(process: subprocess.Popen[bytes]) -> None:
    """Stop the vLLM server and the engines that it started; kill them after `STOPS_WITHIN`."""
    assert process.stdin
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOPS_WITHIN)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def is_healthy(address: str) -> bool:
    """Return whether the vLLM server answers health checks."""
    try:
        urllib.request.urlopen(f"{address}/health", timeout=5).close()
        return True
    except OSError:  # no connection, or a status other than 200
        return False


def server_flags(arguments: EngineArgs) -> list[str]:
    """Convert engine arguments to command-line flags of the vLLM server, without None values."""
    words: list[str] = []
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
    """Wait until the caller of the vLLM server has ended, then end the server's processes."""
    sys.stdin.buffer.read()
    os.killpg(os.getpgrp(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
