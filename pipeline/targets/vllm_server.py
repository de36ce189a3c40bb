"""Measure latencies of vLLM's OpenAI server under a load of concurrent requests.

The server runs on this machine's loopback, as `python -m pipeline.targets.vllm_server FLAGS`, in a
process group of its own. The server always ends with the process that started it: a thread waits
for the end of its standard input.

Requests are sent and timed by the client of vLLM's own benchmark (`vllm bench serve`) at a fixed
concurrency: a request is sent when another ends. The client does not see a request's steps. The
acceleration rate is the number of answer tokens, without each answer's first token, which the
prefill yields, over the number of drafts that the server has counted.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import IO, Any

from pipeline.errors import EnvironmentFault
from pipeline.targets.loading import require_gpus
from pipeline.targets.own_process import Report, environment, in_own_process, last_line
from pipeline.targets.spec import TargetSpec, context_length, eos_token_ids
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
class LoadTask:
    """The prompts and load levels of one vLLM server; `engine_args` are empty without heads.

    A level is a number of concurrent requests. Prompts repeat in order until there are at least
    `ROUNDS` times as many requests. All levels are measured `repeats` times in turns, and each
    level reports its pass of median duration: other work on the machine disturbs one pass of
    several levels rather than all passes of one level.
    """

    spec: TargetSpec
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    levels: Sequence[int]
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    repeats: int = 1
    gpus: int = 0


def serve_under_load(
    tasks: Sequence[LoadTask], on_report: Report | None = None
) -> list[list[dict[str, Any]]]:
    """Measure one vLLM server per task under load.

    Prefixes are not cached. Texts are greedy and end at the target's own EOS ids.

    Returns:
        Per server and level {"requests": concurrent requests, "seconds", "num_tokens", "ttft":
        seconds from each request to its first token, "tpot": seconds per further token, None for an
        answer of one token, "acceleration_rate": None without drafts}.

    Raises:
        EnvironmentFault: The server cannot start, or requests fail.
    """
    return [in_own_process(measure_server, task, on_report) for task in tasks]


def measure_server(task: LoadTask, report: Report) -> list[dict[str, Any]]:
    """Start one vLLM server and return its figures per load level."""
    import_vllm()
    side = "vLLM's server with the heads" if task.engine_args else "vLLM's server"
    report(part=f"{side} starts")
    context = context_length(task.spec)
    eos = eos_token_ids(task.spec)
    questions = []
    for ids in task.prompts:
        questions.append((list(ids), min(task.max_new_tokens, context - len(ids))))
    passes: dict[int, list[dict[str, Any]]] = {level: [] for level in task.levels}
    loads = [*task.levels] * task.repeats
    arguments = {**task.engine_args, "enable_prefix_caching": False}
    with running_server(task.spec, arguments, task.gpus) as address:
        for turn, level in enumerate(loads):
            note = f"{level} requests at once"
            report(part=side, done=turn, total=len(loads), unit="loads", note=note)
            num_requests = max(len(questions), ROUNDS * level)
            requests = list(islice(cycle(questions), num_requests))
            passes[level].append(asyncio.run(_benchmark(address, requests, level, eos)))
    rows = []
    for of_level in passes.values():
        by_length = sorted(of_level, key=lambda row: row["seconds"])
        rows.append(by_length[(len(by_length) - 1) // 2])
    return rows


async def _benchmark(
    address: str, requests: Sequence[tuple[list[int], int]], level: int, eos: Sequence[int]
) -> dict[str, Any]:
    """Send requests to a server with vLLM's benchmark client, after a warm-up; return figures."""
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark

    found = await benchmark(
        task_type=TaskType.GENERATION,
        endpoint_type="openai",
        api_url=f"{address}/v1/completions",
        base_url=address,
        model_id=NAME,
        model_name=NAME,
        tokenizer=None,
        input_requests=[SampleRequest(ids, len(ids), limit) for ids, limit in requests],
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
    if found["failed"]:
        reason = last_line("\n".join(found["errors"]))
        what = f"{found['failed']} requests to vLLM's server failed: {reason}"
        raise EnvironmentFault(what, WHERE, FIX)
    tpot: list[float | None] = []
    answers = zip(found["ttfts"], found["latencies"], found["output_lens"], strict=True)
    for ttft, latency, num in answers:
        tpot.append((latency - ttft) / (num - 1) if num > 1 else None)
    rate = None
    num_tokens, num_drafts = found["total_output_tokens"], found.get("spec_decode_num_drafts")
    if num_drafts:
        rate = (num_tokens - len(requests)) / num_drafts
    return {
        "requests": level,
        "seconds": found["duration"],
        "num_tokens": num_tokens,
        "ttft": found["ttfts"],
        "tpot": tpot,
        "acceleration_rate": rate,
    }


@contextlib.contextmanager
def running_server(spec: TargetSpec, engine_args: Mapping[str, Any], gpus: int) -> Iterator[str]:
    """Context manager: run a vLLM server of the target; yield its address.

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
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], address: str, log: IO[str]) -> None:
    while not is_healthy(address):
        if process.poll() is not None:
            log.seek(0)
            reason = f"status {process.returncode}: {last_line(log.read())}"
            raise EnvironmentFault(f"vLLM's server ended with {reason}", WHERE, FIX)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the vLLM server and the engines that it started."""
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
        with urllib.request.urlopen(f"{address}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def server_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Convert engine arguments to command-line flags of vLLM's server; None is left out."""
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
    sys.stdin.buffer.read()
    os.killpg(os.getpgrp(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
