"""The export decoded by vLLM as it will be served (`method: medusa`), against vLLM without it.

vLLM proposes the heads' top-1 chain, never the tree, so its acceleration rate is the lower one.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from pipeline.config import CheckConfig
from pipeline.evaluation.comparison import GapAt, compare, gap_of, tie_tolerance
from pipeline.evaluation.prompts import Prompt
from pipeline.execution.progress import ProgressReporter
from pipeline.targets.loading import load_causal_lm
from pipeline.targets.spec import TargetSpec
from pipeline.targets.vllm_decode import vllm_decode_check


def check_served(
    target: TargetSpec,
    export: str,
    prompts: list[Prompt],
    settings: CheckConfig,
    num_heads: int,
    gpus: int,
    progress: ProgressReporter | None = None,
) -> dict[str, Any]:
    """Decode every prompt greedily in vLLM, plainly and with the heads.

    Returns:
        `vllm` of report.json, and the `differing` sequences that are not ties.
    """
    if progress:
        progress.begin("vLLM", 0, done=len(prompts), unit="prompts at once")
    ids = [prompt.ids for prompt in prompts]
    decoded = vllm_decode_check(
        target, Path(export), ids, settings.max_new_tokens, num_heads, repeats=settings.repeats, gpus=gpus
    )
    plain, medusa = decoded["plain"], decoded["medusa"]
    tolerance = tie_tolerance(target, settings)
    names = [prompt.id for prompt in prompts]

    @functools.cache
    def gap_in_target() -> GapAt:  # only where sequences differ is the target loaded once more
        return gap_of(load_causal_lm(target, "cuda" if gpus else "cpu", max(1, gpus)))

    def gap_at(prefix: list[int]) -> float:
        return gap_in_target()(prefix)

    match = compare(names, ids, plain["token_ids"], medusa["token_ids"], gap_at, tolerance)
    drafts = max(1, medusa["num_drafts"])
    return {
        "vllm": {
            "acceleration_rate": round(medusa["acceleration_rate"], 4),
            "accepted_per_position": [round(count / drafts, 4) for count in medusa["accepted_per_position"]],
            "speedup": round(medusa["tokens_per_second"] / plain["tokens_per_second"], 4),
            "tokens_per_second": round(medusa["tokens_per_second"], 2),
            "baseline_tokens_per_second": round(plain["tokens_per_second"], 2),
            "greedy_match": match.as_dict(),
        },
        "differing": match.differing,
    }
