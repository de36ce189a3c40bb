"""Benchmark of vLLM with both kinds of heads over plain vLLM, with one request and with many.

    python -m benchmarks.run serving    # after both demos: 3 minutes

The demos' own exports answer the check's prompts greedily, each engine in turn, with as many draft
tokens as calibrate chose. On a CPU a forward of few tokens costs in proportion to their number, so
heads gain less here than on a GPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import targets
from benchmarks.claims import Claim, Result
from benchmarks.ladder import DEMO, FEW
from pipeline.api.runs import Run, open_run, run_flow
from pipeline.config.load import load_config
from pipeline.decoding.held_out import rate_of_answers
from pipeline.evaluation.prompts import held_out_prompts
from pipeline.export.layout import read_layout
from pipeline.targets.spec import TargetSpec, context_length, resolve
from pipeline.targets.vllm_decode import DecodeTask, decode_in_vllm

RUNS = {"Medusa": "runs/demo", "recurrent": "runs/demo-recurrent"}
AT_ONCE, NUM_PROMPTS, NEW_TOKENS, REPEATS = (1, 32), 32, 64, 3


def measure(*, tiny: bool = False) -> Result:
    """Measure the exports of the two demos in this checkout, in vLLM."""
    if not tiny:
        return served(
            {name: open_run(targets.ROOT / path) for name, path in RUNS.items()}, AT_ONCE, REPEATS
        )
    with tempfile.TemporaryDirectory() as temporary:
        target = targets.random_demo_target(Path(temporary) / "target").model
        places = (f"run.root={temporary}", f"run.store={temporary}/store", f"target.model={target}")
        words = (*places, *FEW, "calibrate.nodes=3", "train.lr=1e-3")
        config = load_config(DEMO, [*words, "train.heads=recurrent"])
        return served(
            {"recurrent": run_flow(config, until="export", executor="inline", quiet=True)},
            (1,),
            1,
            8,
        )


def served(
    runs: Mapping[str, Run], at_once: Sequence[int], repeats: int, new_tokens: int = NEW_TOKENS
) -> Result:
    """Measure each run's export in vLLM, for each number of concurrent requests."""
    first = next(iter(runs.values()))
    target = resolve(first.config.target, on_gpu=False)
    found = held_out_prompts(
        first.generated("check"), NUM_PROMPTS, context_length(target) - new_tokens
    )
    prompts = [prompt.ids for prompt in found.kept]
    exports = {name: run.export for name, run in runs.items()}
    claims = [
        claim
        for number in at_once
        for claim in _compared(target, exports, prompts, number, repeats, new_tokens)
    ]
    return Result(claims, {"prompts": len(prompts), "new_tokens": new_tokens, "repeats": repeats})


def _compared(
    target: TargetSpec,
    exports: Mapping[str, Path],
    prompts: Sequence[Sequence[int]],
    at_once: int,
    repeats: int,
    new_tokens: int,
) -> list[Claim]:
    """Return a claim per export: tokens per second with its heads over plain vLLM's."""
    chosen = [read_layout(path).engine_args(path, target.model) for path in exports.values()]
    limit = {"max_num_seqs": at_once}
    task = DecodeTask(target, prompts, new_tokens, limit, repeats=repeats)
    tasks = [task, *(replace(task, engine_args={**limit, **with_heads}) for with_heads in chosen)]
    plain, *others = decode_in_vllm(tasks)
    speed = {"plain, tokens/s": plain.tokens_per_second}
    claims = []
    for name, found in zip(exports, others, strict=True):
        same = sum(
            one == other for one, other in zip(found.token_ids, plain.token_ids, strict=True)
        )
        sides = speed | {
            f"{name}, tokens/s": found.tokens_per_second,
            "acceleration rate": rate_of_answers(found.accepted, range(len(prompts))).rate,
            f"of {len(prompts)} texts the same": same,
        }
        what = f"vLLM with {name} heads over plain, {at_once} at once"
        claims.append(Claim(what, found.tokens_per_second / plain.tokens_per_second, sides=sides))
    return claims
