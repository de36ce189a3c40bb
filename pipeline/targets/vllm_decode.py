"""Exported heads decoded in vLLM, against plain vLLM: the same prompts, greedily.

The two engines run one after the other outside of this process, so that nothing of vLLM stays
behind in the caller; with GPUs in a process each, because only a process's end frees their memory
for certain. vLLM proposes the heads' top-1 chain, never a tree, so its acceleration rate is below
the tree's.

A request's steps are counted by what it returns. Its first output is the prefill's token, and each
later one what one forward of the target has added, cut where the text ends. vLLM's own counters go
on beyond that end (1 + accepted / drafts is 2 to 4 % above the tokens kept per step on the demos),
and count a draft of padding for a prompt of one token that joins a running batch.

vLLM 0.32 drafts for no request of a batch while one of them is so long that its text, the draft
that is being verified and one more exceed the context: each then takes steps of one token. With
room for a single draft this cost 5 of 398 steps of a recurrent chain of 14 tokens. The check leaves
room for two, as far as the target's own context has it.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pipeline.conversations.requests import Request
from pipeline.targets.own_process import SECONDS_BETWEEN_LOOKS, Tell, in_own_process, work_off
from pipeline.targets.spec import TargetSpec, context_length, eos_token_ids
from pipeline.targets.vllm_engine import RunningEngine, sampling_params

NUM_WARM_UPS = 2  # prompts, not counted


def vllm_decode_check(
    spec: TargetSpec,
    with_heads: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    repeats: int = 1,
    gpus: int = 0,
    told: Tell | None = None,
) -> dict[str, Any]:
    """What vLLM decodes greedily from `prompts`, without the heads and with them, after a warm-up.

    Args:
        with_heads: The arguments that start vLLM with the heads: a `speculative_config`, or
            `model`, an export that names this target itself.
        told: Called with how far it has come, as `in_own_process` does.

    Returns:
        {"plain": {"token_ids": list of ids per prompt, "accepted": per prompt, the number of tokens
         that each forward after the prefill adds, as `Decoded` has it, "num_tokens", "seconds": the
         median of `repeats`, "tokens_per_second", "model_runner": V1 or V2}, "accelerated": the
         same}. Both decode all prompts at once, without a prefix cache.

    Raises:
        ConfigError, EnvironmentFault: As VLLMGenerationEngine does, and EnvironmentFault where an
        engine dies.
    """
    sides = [{}, with_heads]
    plain, accelerated = decode_in_vllm(
        spec, sides, prompts, max_new_tokens, repeats=repeats, gpus=gpus, told=told
    )
    return {"plain": plain, "accelerated": accelerated}


def decode_in_vllm(
    spec: TargetSpec,
    engine_args: Sequence[Mapping[str, Any]],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    repeats: int = 1,
    gpus: int = 0,
    at_once: int | None = None,
    told: Tell | None = None,
) -> list[dict[str, Any]]:
    """One side of `vllm_decode_check` for each set of arguments; an empty one is plain decoding.

    Args:
        at_once: How many prompts an engine decodes at the same time; None for all.
    """
    task: dict[str, Any] = {
        "spec": asdict(spec),
        "prompts": [list(ids) for ids in prompts],
        "at_once": at_once,
    }
    task |= {"max_new_tokens": max_new_tokens, "repeats": repeats, "gpus": gpus}
    tasks = [{**task, "engine_args": dict(chosen)} for chosen in engine_args]
    processes = [[task] for task in tasks] if gpus else [tasks]
    return [result for batch in processes for result in in_own_process(__name__, batch, told)]


def decode(task: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Decode the task's prompts greedily with one engine in this process: one side of
    `vllm_decode_check`.
    """
    spec = TargetSpec(**task["spec"])
    ours: dict[str, Any] = {"enable_prefix_caching": False}
    ours |= {"max_num_seqs": task["at_once"]} if task["at_once"] else {}
    side, repeats = "vLLM with the heads" if task["engine_args"] else "plain vLLM", task["repeats"]
    tell(part=f"{side} starts")
    running = RunningEngine(spec, {**ours, **task["engine_args"]}, task["gpus"])
    eos, context = eos_token_ids(spec), context_length(spec)
    requests = [
        Request(str(row), ids, min(task["max_new_tokens"], context - len(ids)))
        for row, ids in enumerate(task["prompts"])
    ]

    def told(turn: int, done: int, num_tokens: int) -> None:
        done += turn * len(requests)
        tell(
            part=side,
            done=done,
            total=repeats * len(requests),
            unit="prompts",
            note=f"{num_tokens:,} tokens",
        )

    told(0, 0, 0)
    _generate(running, requests[:NUM_WARM_UPS], eos, lambda *_: None)
    passes = [
        _generate(running, requests, eos, functools.partial(told, turn)) for turn in range(repeats)
    ]
    answers, _ = passes[0]
    seconds = statistics.median(taken for _, taken in passes)
    token_ids = [[token for new_ids in steps for token in new_ids] for steps in answers]
    num_tokens = sum(map(len, token_ids))
    result: dict[str, Any] = {"token_ids": token_ids, "num_tokens": num_tokens, "seconds": seconds}
    result["accepted"] = [[len(new_ids) for new_ids in steps[1:]] for steps in answers]
    result["tokens_per_second"] = num_tokens / seconds
    result["model_runner"] = (
        "V2" if running.llm.llm_engine.vllm_config.use_v2_model_runner else "V1"
    )
    running.close()
    return result


def _generate(
    running: RunningEngine,
    requests: list[Request],
    eos: tuple[int, ...],
    tell: Callable[[int, int], None],
) -> tuple[list[list[list[int]]], float]:
    """Each request's tokens by step, the prefill's first, and the seconds that all of them take.

    All requests are under way at once. A forward that returns nothing for a request is no step of
    it: a part of a prompt in chunked prefill, or one that asynchronous scheduling has begun before
    the request's end was known. A request that was preempted is computed again, and the forward
    that continues its text is a step.

    Args:
        tell: Called now and then with the finished requests and the tokens that have been written.
    """
    from vllm.sampling_params import RequestOutputKind

    engine = running.llm.llm_engine
    steps: dict[str, list[list[int]]] = {request.id: [] for request in requests}
    num_finished = num_tokens = 0
    started = told = time.perf_counter()
    for request in requests:
        prompt: Any = {"type": "token", "prompt_token_ids": request.prompt_ids}
        params = sampling_params(request, eos)
        params.output_kind = RequestOutputKind.DELTA
        engine.add_request(request.id, prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            new_ids = list(output.outputs[0].token_ids)
            if new_ids:
                steps[output.request_id].append(new_ids)
            num_finished += output.finished
            num_tokens += len(new_ids)
        if time.perf_counter() - told > SECONDS_BETWEEN_LOOKS:
            tell(num_finished, num_tokens)
            told = time.perf_counter()
    return list(steps.values()), time.perf_counter() - started


if __name__ == "__main__":
    work_off(decode, *sys.argv[1:])
