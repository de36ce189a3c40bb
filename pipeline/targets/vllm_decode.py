"""Decode prompts greedily in vLLM, with or without exported heads.

Engines run in other processes, so that vLLM changes nothing in the caller. On a CPU one process
runs all engines but the optional ones, and imports vLLM once. Each optional engine, and on a GPU
every one, has its own process: its death ends no other, and only the end of a process is certain to
free a GPU's memory. vLLM proposes the heads' top-1 chain, never a tree, so its acceleration rate is
below the tree's.

A request's steps are counted from its outputs. The first output is the prefill's token. Each later
output holds the tokens that one forward pass of the target has added, cut where the text ends.
vLLM's own counters are not used: they also count tokens after the end of a text, which makes 1 +
accepted / drafts 2 to 4 % too large on the demos.

vLLM 0.32 stops drafting for the whole batch while one of its requests is too close to the end of
the context: there must be room for its text, the draft that is verified, and another draft.
Meanwhile every request gets one token per step. The check stage leaves room for two drafts, if the
target's context allows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from pipeline.conversations.requests import Request, TextCounts
from pipeline.errors import MedusaDistillError
from pipeline.targets.own_process import Report, in_own_process
from pipeline.targets.spec import (
    EngineArgs,
    TargetSpec,
    context_length,
    eos_token_ids,
    one_line,
)
from pipeline.targets.vllm_engine import RunningEngine, sampling_params, token_prompt
from pipeline.targets.vllm_logits import LogitAnswer, LogitRequest, read_logits

if TYPE_CHECKING:
    from vllm import RequestOutput

WARM_UP_TOKENS = 8  # of each prompt, not timed
ENOUGH_SECONDS, ENOUGH_REPEATS = 2.0, 5  # a small target is measured until either is reached


@dataclass(frozen=True)
class VLLMTexts:
    """The texts that one vLLM engine decoded.

    Attributes:
        token_ids: The generated token ids for each prompt, without the prompt.
        accepted: For each prompt, the number of tokens that each pass after the prefill added.
        seconds: The duration of each repeat, with all prompts at once.
        seconds_in_turn: For each repeat, the duration of each prompt that was decoded alone, by its
            index.
        logits: The answers to each batch of requests for logits.
        failed: Why an optional task failed; its other attributes are empty.
    """

    token_ids: list[list[int]] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    seconds_in_turn: list[dict[int, float]] = field(default_factory=list)
    logits: list[list[LogitAnswer]] = field(default_factory=list)
    failed: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second with all prompts at once, the median of the repeats."""
        return statistics.median(self.at_once())

    def with_repeats(self, later: VLLMTexts) -> VLLMTexts:
        """Return these texts with the durations of a later measurement as further repeats."""
        seconds = [*self.seconds, *later.seconds]
        in_turn = [*self.seconds_in_turn, *later.seconds_in_turn]
        return replace(self, seconds=seconds, seconds_in_turn=in_turn)

    def at_once(self) -> list[float]:
        """Return the tokens per second of each repeat with all prompts at once."""
        num_tokens = sum(map(len, self.token_ids))
        return [num_tokens / seconds for seconds in self.seconds]

    def in_turn(self) -> list[float]:
        """Return the tokens per second of each repeat with one prompt after another."""
        speeds = []
        for seconds in self.seconds_in_turn:
            num_tokens = sum(len(self.token_ids[row]) for row in seconds)
            speeds.append(num_tokens / sum(seconds.values()))
        return speeds


@dataclass(frozen=True)
class DecodeTask:
    """The prompts and settings for greedy decoding in one vLLM engine.

    Attributes:
        prompts: The token ids of each prompt.
        engine_args: Arguments of `vllm.LLM`; empty for plain decoding. With heads, they have a
            `speculative_config`, or their `model` is an export that itself names the target.
        in_turn: The indices of the prompts that are also decoded one after another.
        repeats: How often the prompts are decoded, all at once and some in turn; a small
            target more often.
        gpus: Tensor-parallel size; 0 runs on the CPU.
        name: The decoding method, for the progress.
        optional: Whether a failure of this task is returned instead of raised.
        asked: Batches of requests for logits, run after the prompts are decoded. With requests, the
            engine's arguments must include `LOGITS`.
    """

    spec: TargetSpec
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    engine_args: EngineArgs = field(default_factory=dict)
    in_turn: Sequence[int] = ()
    repeats: int = 1
    gpus: int = 0
    name: str = "plain vLLM"
    optional: bool = False
    asked: Sequence[Sequence[LogitRequest]] = ()

    def requests(self) -> list[Request]:
        """Return a greedy request for each prompt; prompt and answer fit into the context."""
        context = context_length(self.spec)
        requests = []
        for row, ids in enumerate(self.prompts):
            limit = min(self.max_new_tokens, context - len(ids))
            requests.append(Request(str(row), list(ids), limit))
        return requests


def decode_in_vllm(tasks: Sequence[DecodeTask], on_report: Report | None = None) -> list[VLLMTexts]:
    """Decode each task's prompts greedily in a vLLM engine of its own, in another process.

    Optional tasks must follow the others. A warm-up is not timed, and prefixes are not cached.

    Args:
        on_report: Called with the progress, see `in_own_process`.

    Raises:
        ConfigError: As `VLLMGenerationEngine` does.
        EnvironmentFault: As `VLLMGenerationEngine` does, or a process ends without a result.
    """
    if any(task.gpus for task in tasks):
        parts = [[task] for task in tasks]
    else:
        required = [task for task in tasks if not task.optional]
        parts = [required, *([task] for task in tasks if task.optional)]
    found: list[VLLMTexts] = []
    for part in parts:
        try:
            found += in_own_process(decode_tasks, part, on_report)
        except MedusaDistillError as error:
            if not part[0].optional:
                raise
            found.append(VLLMTexts(failed=one_line(error)))
    return found


def decode_tasks(tasks: Sequence[DecodeTask], report: Report) -> list[VLLMTexts]:
    """Decode the prompts of all tasks in this process, with one vLLM engine after another."""
    return [decode_task(task, report) for task in tasks]


def decode_task(task: DecodeTask, report: Report) -> VLLMTexts:
    """Decode a task's prompts greedily in a vLLM engine in this process.

    The engine is started, and closed afterwards. The texts come from the last repeat.
    """
    report(part=f"{task.name} starts")
    arguments = {**task.engine_args, "enable_prefix_caching": False}
    running = RunningEngine(task.spec, arguments, task.gpus)
    try:
        texts = _measure(running, task, report)
        logits = [read_logits(running.llm, requests) for requests in task.asked]
        return replace(texts, logits=logits)
    finally:
        running.close()


def _measure(running: RunningEngine, task: DecodeTask, report: Report) -> VLLMTexts:
    """Decode a task's prompts in a running engine, all at once and some in turn."""
    part = task.name
    eos = eos_token_ids(task.spec)
    requests = task.requests()
    alone = [[requests[row]] for row in task.in_turn]
    warm_ups = []
    for request in requests:
        limit = min(WARM_UP_TOKENS, request.max_new_tokens)
        warm_ups.append(replace(request, max_new_tokens=limit))
    _generate(running, [warm_ups], eos, partial(report, part=f"{part} warms up"))
    answers: list[list[list[int]]] = []
    seconds: list[float] = []
    seconds_in_turn = []
    end = time.perf_counter() + ENOUGH_SECONDS
    while len(seconds) < task.repeats or (
        len(seconds) < ENOUGH_REPEATS and time.perf_counter() < end
    ):
        turn_of = f"{part}, repeat {len(seconds) + 1}"
        answers, durations = _generate(running, [requests], eos, partial(report, part=turn_of))
        seconds += durations
        show = partial(report, part=f"{turn_of}, one at a time")
        _, durations = _generate(running, alone, eos, show)
        seconds_in_turn.append(dict(zip(task.in_turn, durations, strict=True)))
    return VLLMTexts(
        token_ids=[list(chain.from_iterable(steps)) for steps in answers],
        accepted=[[len(new_ids) for new_ids in steps[1:]] for steps in answers],
        seconds=seconds,
        seconds_in_turn=seconds_in_turn,
    )


def _generate(
    running: RunningEngine,
    batches: Sequence[Sequence[Request]],
    eos: tuple[int, ...],
    show: Report,
) -> tuple[list[list[list[int]]], list[float]]:
    """Run one batch of requests after another in a vLLM engine, and report the counts of texts.

    Return for each request the token ids of each step, and the duration of each batch in seconds.

    The first step is the prefill. A forward that returns no token for a request is not a step of
    this request: it computed a chunk of the prompt, or was scheduled before the request's end was
    known. A preempted request is computed again, and the forward that continues its text is a step.
    """
    from vllm.sampling_params import RequestOutputKind

    engine = running.llm.llm_engine
    limits = [request.max_new_tokens for requests in batches for request in requests]
    texts = TextCounts(left=len(limits), longest=max(limits, default=0))
    steps: dict[str, list[list[int]]] = {}
    durations = []
    for requests in batches:
        started = time.perf_counter()
        for request in requests:
            steps[request.id] = []
            params = sampling_params(request, eos)
            params.output_kind = RequestOutputKind.DELTA
            engine.add_request(request.id, token_prompt(request.prompt_ids), params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                _add_step(steps[output.request_id], output, texts)
            show(
                done=texts.ended,
                total=len(limits),
                unit="prompts",
                tokens=texts.tokens,
                tokens_left=texts.tokens_left,
            )
        durations.append(time.perf_counter() - started)
    return list(steps.values()), durations


def _add_step(steps: list[list[int]], output: RequestOutput, texts: TextCounts) -> None:
    """Add the token ids of an output to the steps of its request, and count them in `texts`."""
    new_ids = list(output.outputs[0].token_ids)
    if new_ids:
        steps.append(new_ids)
    texts.running_tokens += len(new_ids)
    if output.finished:
        length = sum(map(len, steps))
        texts.running_tokens -= length
        texts.left -= 1
        texts.end_text(length)
