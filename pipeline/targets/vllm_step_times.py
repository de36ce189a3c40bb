"""Seconds of a step in vLLM, plain and with draft tokens: `calibrate.draft_tokens: auto` weighs acceptance by them.

One request at a time, from one output of the engine to the next, without the prefill. On a CPU all engines live in one
process and take turns for each prompt, so that a machine that gets busy slows them all; on a GPU each has a process of
its own, whose end frees the memory. An engine's time is the lower decile of its steps, since other work only adds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from time import perf_counter
from typing import Any

from pipeline.conversations.requests import Request
from pipeline.targets.own_process import Tell, in_own_process, work_off
from pipeline.targets.spec import TargetSpec, context_length
from pipeline.targets.vllm_engine import RunningEngine, sampling_params

NUM_NEW_TOKENS = 64


def step_seconds(
    spec: TargetSpec, engine_args: Sequence[Mapping[str, Any]], prompts: Sequence[Sequence[int]], *, gpus: int = 0
) -> list[float]:
    """The seconds of a step for each set of engine arguments; an empty one is plain decoding.

    Prompts must leave room in the context; the first is also the warm-up.

    Raises:
        ConfigError, EnvironmentFault: As VLLMGenerationEngine does, and EnvironmentFault where an engine dies.
    """
    task = {"spec": asdict(spec), "prompts": [list(ids) for ids in prompts], "gpus": gpus}
    together = [[dict(chosen)] for chosen in engine_args] if gpus else [[dict(chosen) for chosen in engine_args]]
    found = [in_own_process(__name__, [{**task, "engines": engines}]) for engines in together]
    return [seconds for (times,) in found for seconds in times]


def measure(task: Mapping[str, Any], tell: Tell) -> list[float]:
    """The seconds per step of engines that take turns in this process."""
    ours: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 1}
    spec, prompts = TargetSpec(**task["spec"]), task["prompts"]
    room = context_length(spec)
    engines = [RunningEngine(spec, {**ours, **chosen}, task["gpus"]) for chosen in task["engines"]]
    steps: list[list[float]] = [[] for _ in engines]
    for turn, ids in enumerate([prompts[0], *prompts]):
        tell(part="vLLM's steps timed", done=turn, total=1 + len(prompts), unit="prompts")
        for running, found in zip(engines, steps, strict=True):
            times = _outputs(running.llm.llm_engine, ids, min(NUM_NEW_TOKENS, room - len(ids)), str(turn))
            taken = [later - earlier for earlier, later in pairwise(times)]
            found += taken if turn else []  # the first turn is the warm-up
    for running in reversed(engines):
        running.close()
    return [sorted(found)[len(found) // 10] for found in steps]


def _outputs(engine: Any, ids: list[int], num_tokens: int, name: str) -> Iterator[float]:
    """When each step's tokens of a request were there, the prefill's first, whatever it writes."""
    from vllm.sampling_params import RequestOutputKind

    params = sampling_params(Request(name, ids, num_tokens), eos=())
    params.output_kind = RequestOutputKind.DELTA
    engine.add_request(name, {"type": "token", "prompt_token_ids": ids}, params)
    while engine.has_unfinished_requests():
        if engine.step():
            yield perf_counter()


if __name__ == "__main__":
    work_off(measure, *sys.argv[1:])
