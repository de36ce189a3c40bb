"""Decode prompts greedily in vLLM, with or without exported heads.

Engines run in other processes, so that vLLM leaves nothing behind in the caller. On a CPU one
process runs all engines and imports vLLM once. On a GPU each engine has its own process, since only
the end of a process is certain to free the GPU's memory. vLLM proposes the heads' top-1 chain,
never a tree, so its acceleration rate is below the tree's.

A request's steps are counted from its outputs. The first output is the prefill's token, and each
later output holds the tokens that one forward of the target has added, cut where the text ends.
vLLM's own counters continue beyond the end of the text (1 + accepted / drafts is 2 to 4 % above the
tokens kept per step on the demos), and count a draft of padding for a prompt of one token that
joins a running batch.

vLLM 0.32 drafts for no request of a batch while the context lacks room for one request's text, the
draft being verified and one more draft. Every request then gets one token per step. With room for a
single draft this cost 5 of 398 steps of a recurrent chain of 14 tokens. The check stage leaves room
for two drafts, if the target's context allows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from pipeline.conversations.requests import Request
from pipeline.targets.own_process import Report, in_own_process
from pipeline.targets.spec import EngineArgs, TargetSpec, context_length, eos_token_ids
from pipeline.targets.vllm_engine import RunningEngine, sampling_params, token_prompt

NUM_WARM_UPS = 2  # prompts that are not timed


@dataclass(frozen=True)
class VLLMTexts:
    """The texts that one vLLM engine decoded.

    Attributes:
        token_ids: The generated token ids of each prompt, without the prompt.
        accepted: For each prompt, the number of tokens that each forward after the prefill adds.
        seconds: The duration for all prompts together, the median of the repeats.
    """

    token_ids: list[list[int]]
    accepted: list[list[int]]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """The decoding speed of the target's vLLM engine, over all prompts."""
        return sum(map(len, self.token_ids)) / self.seconds


@dataclass(frozen=True)
class DecodeTask:
    """The prompts and settings of one vLLM engine that decodes.

    Attributes:
        engine_args: Empty for plain decoding. With heads they hold a `speculative_config`, or as
            `model` an export that names this target itself.
    """

    spec: TargetSpec
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    engine_args: EngineArgs = field(default_factory=dict)
    repeats: int = 1
    gpus: int = 0

    def requests(self) -> list[Request]:
        """Return a greedy request to the target's vLLM engine per prompt, within its context."""
        context = context_length(self.spec)
        requests = []
        for row, ids in enumerate(self.prompts):
            limit = min(self.max_new_tokens, context - len(ids))
            requests.append(Request(str(row), list(ids), limit))
        return requests


def decode_in_vllm(tasks: Sequence[DecodeTask], on_report: Report | None = None) -> list[VLLMTexts]:
    """Load each task's target into a vLLM engine, in another process, and decode its prompts.

    Texts are greedy. A warm-up is not timed, and prefixes are not cached.

    Args:
        on_report: Called with the progress, as `in_own_process` does.

    Raises:
        ConfigError: As `VLLMGenerationEngine` does.
        EnvironmentFault: As `VLLMGenerationEngine` does, or the process of an engine ends early.
    """
    if any(task.gpus for task in tasks):
        return [in_own_process(decode_task, task, on_report) for task in tasks]
    texts: list[VLLMTexts] = in_own_process(decode_tasks, list(tasks), on_report)
    return texts


def decode_tasks(tasks: Sequence[DecodeTask], report: Report) -> list[VLLMTexts]:
    """Decode all tasks in this process, with one vLLM engine of the target after another."""
    return [decode_task(task, report) for task in tasks]


def decode_task(task: DecodeTask, report: Report) -> VLLMTexts:
    """Load the target into a vLLM engine in this process, and decode a task's prompts.

    The texts are those of the last repeat. The engine is closed afterwards.
    """
    part = "vLLM with the heads" if task.engine_args else "plain vLLM"
    report(part=f"{part} starts")
    arguments = {**task.engine_args, "enable_prefix_caching": False}
    running = RunningEngine(task.spec, arguments, task.gpus)
    eos = eos_token_ids(task.spec)
    requests = task.requests()
    _generate_in_vllm(running, requests[:NUM_WARM_UPS], eos, f"{part} warms up", report)
    answers: list[list[list[int]]] = []
    seconds = []
    for turn in range(1, task.repeats + 1):
        turn_of = f"{part}, {turn} of {task.repeats}"
        started = time.perf_counter()
        answers = _generate_in_vllm(running, requests, eos, turn_of, report)
        seconds.append(time.perf_counter() - started)
    running.close()
    return VLLMTexts(
        token_ids=[list(chain.from_iterable(steps)) for steps in answers],
        accepted=[[len(new_ids) for new_ids in steps[1:]] for steps in answers],
        seconds=statistics.median(seconds),
    )


def _generate_in_vllm(
    running: RunningEngine,
    requests: list[Request],
    eos: tuple[int, ...],
    part: str,
    report: Report,
) -> list[list[list[int]]]:
    """Decode requests in the target's vLLM engine; return their tokens by step, prefill first.

    A forward that returns no token for a request is not a step of the request: it computed a chunk
    of the prompt, or was scheduled asynchronously before the request's end was known. A preempted
    request is computed again, and the forward that continues its text is a step.
    """
    from vllm.sampling_params import RequestOutputKind

    engine = running.llm.llm_engine
    num_finished = num_tokens = 0
    steps: dict[str, list[list[int]]] = {request.id: [] for request in requests}
    for request in requests:
        params = sampling_params(request, eos)
        params.output_kind = RequestOutputKind.DELTA
        engine.add_request(request.id, token_prompt(request.prompt_ids), params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            new_ids = list(output.outputs[0].token_ids)
            if new_ids:
                steps[output.request_id].append(new_ids)
            num_finished += output.finished
            num_tokens += len(new_ids)
        note = f"{num_tokens:,} tokens"
        report(part=part, done=num_finished, total=len(requests), unit="prompts", note=note)
    return list(steps.values())
