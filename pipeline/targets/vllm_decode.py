"""Exported heads decoded in vLLM, against plain vLLM: the same prompts, greedily.

The two engines run one after the other outside of this process, so that nothing of vLLM stays behind in the caller;
with GPUs in a process each, because only a process's end frees their memory for certain. vLLM proposes the heads'
top-1 chain, never a tree, so its acceleration rate is below the tree's.
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

COUNTERS = {
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
}
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
        with_heads: The arguments that start vLLM with the heads: a `speculative_config`, or `model`, an export that
            names this target itself.
        told: Called with how far it has come, as `in_own_process` does.

    Returns:
        {"plain": {"token_ids": list of ids per prompt, "num_tokens", "seconds": the median of `repeats`,
         "tokens_per_second", "model_runner": V1 or V2}, "accelerated": the same and, over all repetitions,
         {"num_drafts", "num_draft_tokens", "num_accepted_tokens", "accepted_per_position": accepted tokens per head,
         "acceleration_rate": 1 + accepted / drafts}}. Both decode all prompts at once, with the prefix cache reset
         before each repetition.

    Raises:
        ConfigError, EnvironmentFault: As VLLMGenerationEngine does, and EnvironmentFault where an engine dies.
    """
    sides = [{}, with_heads]
    plain, accelerated = decode_in_vllm(spec, sides, prompts, max_new_tokens, repeats=repeats, gpus=gpus, told=told)
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
    task: dict[str, Any] = {"spec": asdict(spec), "prompts": [list(ids) for ids in prompts], "at_once": at_once}
    task |= {"max_new_tokens": max_new_tokens, "repeats": repeats, "gpus": gpus}
    tasks = [{**task, "engine_args": dict(chosen)} for chosen in engine_args]
    processes = [[task] for task in tasks] if gpus else [tasks]
    return [result for batch in processes for result in in_own_process(__name__, batch, told)]


def decode(task: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Decode the task's prompts greedily with one engine in this process: one side of `vllm_decode_check`."""
    spec = TargetSpec(**task["spec"])
    ours: dict[str, Any] = {"disable_log_stats": False, "enable_prefix_caching": False}
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
        tell(part=side, done=done, total=repeats * len(requests), unit="prompts", note=f"{num_tokens:,} tokens")

    told(0, 0, 0)
    _generate(running, requests[:NUM_WARM_UPS], eos, lambda *_: None)
    before = _counters(running)
    passes = [_generate(running, requests, eos, functools.partial(told, turn)) for turn in range(repeats)]
    token_ids, _ = passes[0]
    seconds = statistics.median(taken for _, taken in passes)
    num_tokens = sum(map(len, token_ids))
    result = {"token_ids": token_ids, "num_tokens": num_tokens, "seconds": seconds}
    result["tokens_per_second"] = num_tokens / seconds
    result["model_runner"] = "V2" if running.llm.llm_engine.vllm_config.use_v2_model_runner else "V1"
    if running.llm.llm_engine.vllm_config.speculative_config:
        result |= _acceptance(_counters(running), before)
    running.close()
    return result


def _generate(
    running: RunningEngine, requests: list[Request], eos: tuple[int, ...], tell: Callable[[int, int], None]
) -> tuple[list[list[int]], float]:
    """What the engine writes for all requests at once, and the seconds that it takes.

    Args:
        tell: Called now and then with the finished requests and the tokens that have been written.
    """
    engine, token_ids = running.llm.llm_engine, dict[str, list[int]]()
    written = _num_tokens(running)
    started = told = time.perf_counter()
    for request in requests:
        prompt: Any = {"type": "token", "prompt_token_ids": request.prompt_ids}
        engine.add_request(request.id, prompt, sampling_params(request, eos))
    while engine.has_unfinished_requests():
        token_ids |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
        if time.perf_counter() - told > SECONDS_BETWEEN_LOOKS:
            tell(len(token_ids), _num_tokens(running) - written)
            told = time.perf_counter()
    return [token_ids[request.id] for request in requests], time.perf_counter() - started


def _num_tokens(running: RunningEngine) -> int:
    """The tokens that the engine has written since its start."""
    return sum(int(metric.value) for metric in running.llm.get_metrics() if metric.name == "vllm:generation_tokens")


def _counters(running: RunningEngine) -> dict[str, list[int]]:
    """What the engine has counted since its start."""
    counts = {}
    for metric in running.llm.get_metrics():
        if metric.name in COUNTERS:
            values = getattr(metric, "values", None)
            counts[COUNTERS[metric.name]] = [metric.value] if values is None else list(values)
    return counts


def _acceptance(now: Mapping[str, list[int]], before: Mapping[str, list[int]]) -> dict[str, Any]:
    counts: dict[str, Any] = {}
    for name in COUNTERS.values():
        then = before.get(name) or [0] * len(now.get(name, []))
        counts[name] = [count - earlier for count, earlier in zip(now.get(name, []), then, strict=True)]
        if name != "accepted_per_position":
            counts[name] = sum(counts[name])
    return counts | {"acceleration_rate": 1 + counts["num_accepted_tokens"] / max(counts["num_drafts"], 1)}


if __name__ == "__main__":
    work_off(decode, *sys.argv[1:])
