"""Measure latencies of vLLM's OpenAI server under a load of concurrent requests.

Requests are sent and timed by the client of vLLM's own benchmark (`vllm bench serve`) at a fixed
concurrency: when a request ends, the next one is sent. The client does not see the steps of a
request. So the acceleration rate is the number of generated tokens, without the first one of each
answer (from the prefill), divided by the number of drafts that the server has counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPException
from itertools import cycle, islice
from urllib.request import urlopen

from pipeline.conversations.requests import Request, TextCounts
from pipeline.errors import EnvironmentFault, MedusaDistillError
from pipeline.targets.loading import require_gpus
from pipeline.targets.own_process import Report, in_own_process
from pipeline.targets.spec import EngineArgs, TargetSpec, eos_token_ids, last_line, one_line
from pipeline.targets.vllm_decode import DecodeTask
from pipeline.targets.vllm_engine import engine_arguments, import_vllm
from pipeline.targets.vllm_server import LOOPBACK, Address, free_port, running_server, server_flags

NAME = "served"  # the model's name in requests
ROUNDS = 2  # least number of requests per concurrent request
SERVERS = 2  # for each task, so that its passes are minutes apart
SECONDS_BETWEEN_COUNTS = 5.0  # of the progress; each is a request to the server
WHERE = "check.studies: load"
FIX = "Take load out of check.studies."


@dataclass(frozen=True)
class LoadTask(DecodeTask):
    """The prompts and load levels for vLLM servers of one kind.

    A level is a number of concurrent requests. Prompts repeat in order until there are at least
    `ROUNDS` requests per concurrent request. A pass measures all levels one after another, and
    there are `repeats` passes in each server. So other work on the machine disturbs one pass of
    several levels rather than all passes of one level.
    """

    levels: Sequence[int] = ()


@dataclass(frozen=True)
class LoadFigures:
    """The figures of one pass at one load level.

    Attributes:
        requests: The number of concurrent requests.
        seconds: The duration of all requests together.
        num_tokens: The number of tokens in all answers.
        ttft: The seconds to the first token of each request.
        tpot: The seconds per further token of each request; None for an answer of one token.
        acceleration_rate: Tokens per step after the prefill; None if the server does not draft.
        speeds: The tokens per second of every pass at this level, see `fastest_passes`.
    """

    requests: int
    seconds: float
    num_tokens: int
    ttft: Sequence[float]
    tpot: Sequence[float | None]
    acceleration_rate: float | None
    speeds: Sequence[float] = ()

    @property
    def speed(self) -> float:
        """The tokens per second of this pass."""
        return self.num_tokens / self.seconds


def serve_under_load(
    tasks: Sequence[LoadTask], on_report: Report | None = None
) -> list[list[LoadFigures] | str]:
    """Measure vLLM servers for each task; return the figures of each task's load levels.

    Servers run one after another: one of each task, `SERVERS` times. Texts are greedy and end at
    the target's own EOS ids. Prefixes are not cached. An optional task of which a server fails has
    the reason instead of figures.

    Raises:
        ConfigError: As `engine_arguments` does.
        EnvironmentFault: vLLM is not importable, GPUs are missing, a server cannot start, or its
            requests fail.
    """
    passes: list[list[LoadFigures]] = [[] for _ in tasks]
    failures: dict[int, str] = {}
    for number, task in SERVERS * list(enumerate(tasks)):
        if number in failures:
            continue
        try:
            passes[number] += in_own_process(measure_server, task, on_report)
        except MedusaDistillError as error:
            if not task.optional:
                raise
            failures[number] = one_line(error)
    return [failures.get(number) or fastest_passes(each) for number, each in enumerate(passes)]


def measure_server(task: LoadTask, report: Report) -> list[LoadFigures]:
    """Start a vLLM server, and measure each pass over the load levels of the task."""
    import_vllm()
    side = f"server of {task.name}"
    report(part=f"{side} starts")
    eos = eos_token_ids(task.spec)
    questions = task.requests()
    loads = [*task.levels] * task.repeats
    passes = []
    arguments = {**task.engine_args, "enable_prefix_caching": False}
    texts = TextCounts(longest=task.max_new_tokens)
    for level in loads:
        texts.left += level + max(len(questions), ROUNDS * level)  # with the warm-up
    with server_of(task.spec, arguments, task.gpus) as address:
        for turn, level in enumerate(loads):
            show = partial(
                report,
                part=side,
                done=turn,
                total=len(loads),
                unit="loads",
                note=f"{level} requests at once",
            )
            show(tokens=texts.tokens, tokens_left=texts.tokens_left)
            num_requests = max(len(questions), ROUNDS * level)
            requests = list(islice(cycle(questions), num_requests))
            with _counted_in_background(address, texts, show):
                passes.append(asyncio.run(_benchmark_server(address, requests, level, eos)))
    return passes


@contextlib.contextmanager
def _counted_in_background(address: str, texts: TextCounts, show: Report) -> Iterator[None]:
    """Context manager: count the texts of a vLLM server every few seconds, and show the counts.

    The counts are the server's own metrics. Without an answer nothing is counted.
    """
    num_texts = texts.left + texts.ended
    over = threading.Event()

    def count() -> None:
        """Count the server's texts until the block is over."""
        while not over.wait(SECONDS_BETWEEN_COUNTS):
            with contextlib.suppress(OSError, HTTPException, ValueError):
                with urlopen(f"{address}/metrics", timeout=SECONDS_BETWEEN_COUNTS) as answer:
                    metrics = answer.read().decode()
                texts.ended = int(_metric(metrics, "vllm:request_success_total"))
                texts.ended_tokens = int(_metric(metrics, "vllm:generation_tokens_total"))
                texts.left = num_texts - texts.ended
                show(tokens=texts.tokens, tokens_left=texts.tokens_left)

    counter = threading.Thread(target=count, daemon=True)
    counter.start()
    try:
        yield
    finally:
        over.set()
        counter.join()


def _metric(metrics: str, name: str) -> float:
    """Return the sum of a counter over its labels, from a server's metrics in Prometheus' form."""
    lines = [line for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def fastest_passes(passes: Sequence[LoadFigures]) -> list[LoadFigures]:
    """Return the fastest pass at each load level, with the speeds of all passes at this level.

    Other work on the machine can only slow a pass.
    """
    by_level: dict[int, list[LoadFigures]] = {}
    for figures in passes:
        by_level.setdefault(figures.requests, []).append(figures)
    rows = []
    for of_level in by_level.values():
        fastest = max(of_level, key=lambda figures: figures.speed)
        speeds = [figures.speed for figures in of_level]
        rows.append(replace(fastest, speeds=speeds))
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
def server_of(spec: TargetSpec, engine_args: EngineArgs, gpus: int) -> Iterator[str]:
    """Context manager: run a vLLM server to measure, and yield its URL when it is ready.

    Raises:
        ConfigError: As `engine_arguments` does.
        EnvironmentFault: The server cannot start, or GPUs are missing.
    """
    require_gpus(gpus)
    address = Address(LOOPBACK, free_port())
    arguments = {
        **engine_arguments(spec, engine_args, gpus),
        "served_model_name": NAME,
        "uvicorn_log_level": "error",
        "skip_tokenizer_init": None,
    }
    flags = server_flags(arguments)
    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        running_server(address, flags, log, WHERE, FIX),
    ):
        yield address.url
