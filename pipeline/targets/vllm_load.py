"""vLLM as a server under load: how long so many requests at once wait for their first token and for
further ones.

Requests are sent and timed by the client of vLLM's own benchmark (`vllm bench serve`), as many at
once as asked: the next one the moment that one has ended. Client and server share the machine.

The client does not see a request's steps. The acceleration rate is the tokens of the answers
without the first of each, which the prefill yields, over the drafts that the server has counted.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pipeline.errors import EnvironmentFault
from pipeline.targets.own_process import Tell, in_own_process, work_off
from pipeline.targets.spec import TargetSpec, context_length, eos_token_ids
from pipeline.targets.vllm_engine import import_vllm
from pipeline.targets.vllm_server import NAME, serving

ROUNDS = 2  # so many requests at least of each that is under way at once


def serve_under_load(
    spec: TargetSpec,
    engine_args: Sequence[Mapping[str, Any]],
    prompts: Sequence[Sequence[int]],
    levels: Sequence[int],
    max_new_tokens: int,
    *,
    repeats: int = 1,
    gpus: int = 0,
    told: Tell | None = None,
) -> list[list[dict[str, Any]]]:
    """For each set of arguments, empty being plain decoding, a server at each level of concurrent
    requests.

    All levels are measured `repeats` times in turns, and of each the pass of median length counts:
    what else runs on the machine for a while disturbs one pass of several levels, and not all
    passes of one.

    Prompts repeat in order until there are `ROUNDS` requests for each one under way; prefixes are
    not cached. Texts are greedy and end as the target's own.

    Returns:
        Per server and level {"requests": at once, "seconds", "num_tokens", "ttft": seconds from
        each request to its first token, "tpot": seconds per further token, None of an answer of
        one, "acceleration_rate": None without drafts}.

    Raises:
        EnvironmentFault: The server cannot start, or requests fail.
    """
    task = {
        "spec": asdict(spec),
        "prompts": [list(ids) for ids in prompts],
        "levels": list(levels),
        "gpus": gpus,
    }
    task |= {"max_new_tokens": max_new_tokens, "repeats": repeats}
    return in_own_process(
        __name__, [{**task, "engine_args": dict(chosen)} for chosen in engine_args], told
    )


def measure(task: Mapping[str, Any], tell: Tell) -> list[dict[str, Any]]:
    """One server's rows."""
    import_vllm()
    spec = TargetSpec(**task["spec"])
    context, num_tokens, prompts = context_length(spec), task["max_new_tokens"], task["prompts"]
    asked = [(ids, min(num_tokens, context - len(ids))) for ids in prompts]
    levels, eos = task["levels"] * task["repeats"], eos_token_ids(spec)
    side = "vLLM's server with the heads" if task["engine_args"] else "vLLM's server"
    passes: dict[int, list[dict[str, Any]]] = {level: [] for level in task["levels"]}
    tell(part=f"{side} starts")
    with serving(
        spec, {**task["engine_args"], "enable_prefix_caching": False}, task["gpus"]
    ) as address:
        for turn, level in enumerate(levels):
            tell(
                part=side,
                done=turn,
                total=len(levels),
                unit="loads",
                note=f"{level} requests at once",
            )
            requests = list(
                itertools.islice(itertools.cycle(asked), max(len(asked), ROUNDS * level))
            )
            passes[level].append(asyncio.run(_benchmark(address, requests, level, eos)))
    return [median_pass(found) for found in passes.values()]


def median_pass(passes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The pass of median length, the faster of the two in the middle."""
    return sorted(passes, key=lambda found: found["seconds"])[(len(passes) - 1) // 2]


async def _benchmark(
    address: str, requests: Sequence[tuple[list[int], int]], level: int, eos: Sequence[int]
) -> dict[str, Any]:
    """What vLLM's benchmark measures of these requests, after as many to warm up as are under way
    at once.
    """
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark

    samples = [SampleRequest(ids, len(ids), room) for ids, room in requests]
    found = await benchmark(
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
    if found["failed"]:
        reason = next(filter(None, found["errors"])).strip().splitlines()[-1]
        what = (
            f"{found['failed']} of {len(samples)} requests to vLLM's server failed: {reason[:300]}"
        )
        raise EnvironmentFault(what, "check.studies: load", "Take load out of check.studies.")
    num_tokens, num_drafts = found["total_output_tokens"], found.get("spec_decode_num_drafts")
    answers = zip(found["ttfts"], found["latencies"], found["output_lens"], strict=True)
    return {
        "requests": level,
        "seconds": found["duration"],
        "num_tokens": num_tokens,
        "ttft": found["ttfts"],
        "tpot": [
            (latency - ttft) / (num - 1) if num > 1 else None for ttft, latency, num in answers
        ],
        "acceleration_rate": (num_tokens - len(samples)) / num_drafts if num_drafts else None,
    }


if __name__ == "__main__":
    work_off(measure, *sys.argv[1:])
