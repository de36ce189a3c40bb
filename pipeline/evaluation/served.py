"""The served check: the export decoded by vLLM, against vLLM without it.

vLLM is started as `vllm serve EXPORT` starts it, with the export as its only model, wherever that names the target that
is checked; else with the two named apart.

vLLM proposes the chain of the heads' top-1 guesses, never a tree, so its acceleration rate is lower than the native
one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.artifacts.tree_file import Calibration
from pipeline.evaluation.answers import compare, tie_tolerance, top_2_gap
from pipeline.evaluation.prompts import CheckRequest
from pipeline.evaluation.speed import rounded
from pipeline.execution.progress import ProgressReporter
from pipeline.export.layout import read_layout
from pipeline.targets.loading import load_causal_lm
from pipeline.targets.quantized import in_engine
from pipeline.targets.vllm_decode import vllm_decode_check

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_served(request: CheckRequest, progress: ProgressReporter | None = None) -> dict[str, Any]:
    """Decode every prompt greedily in vLLM, without the heads and with them.

    Returns:
        `vllm` of report.json, and the `differing` sequences that are not ties.
    """
    settings, prompts, gpus = request.settings, request.prompts, request.gpus
    target = in_engine(request.target, "vllm", on_gpu=gpus > 0)  # in whose dtype a tie is a tie
    with_heads, num_tokens = drafting(request)
    if progress:
        progress.begin("vLLM starts", 0)
    decoded = vllm_decode_check(
        target,
        with_heads,
        [prompt.ids for prompt in prompts],
        settings.max_new_tokens,
        repeats=settings.repeats,
        gpus=gpus,
        told=progress.report if progress else None,
    )
    plain, accelerated = decoded["plain"], decoded["accelerated"]

    @functools.cache
    def model() -> PreTrainedModel:  # loaded only where sequences differ
        return load_causal_lm(target, "cuda" if gpus else "cpu", max(1, gpus))

    texts = plain["token_ids"], accelerated["token_ids"]
    tolerance = tie_tolerance(target, settings, on_gpu=gpus > 0)
    match = compare(prompts, *texts, lambda prefix: top_2_gap(model(), prefix), tolerance)
    drafts = max(1, accelerated["num_drafts"])
    return {
        "vllm": {
            "num_speculative_tokens": num_tokens,
            "export_alone": "model" in with_heads,
            "acceleration_rate": round(accelerated["acceleration_rate"], 4),
            "accepted_per_position": [round(count / drafts, 4) for count in accelerated["accepted_per_position"]],
            "speedup": round(accelerated["tokens_per_second"] / plain["tokens_per_second"], 4),
            "tokens_per_second": round(accelerated["tokens_per_second"], 2),
            "baseline_tokens_per_second": round(plain["tokens_per_second"], 2),
            "model_runners": {"plain": plain["model_runner"], "with heads": accelerated["model_runner"]},
            "greedy_match": match.as_dict(),
            "tie_tolerance": tolerance,
            **match.largest_gap(),
        },
        "differing": match.differing,
    }


def drafting(request: CheckRequest) -> tuple[dict[str, Any], int]:
    """The arguments that start vLLM with the heads, and how many tokens they draft."""
    if config := request.speculative_config:
        return {"speculative_config": dict(config)}, config["num_speculative_tokens"]
    layout = read_layout(request.export)
    return layout.engine_args(request.export, request.target.model), layout.num_speculative_tokens


def chain_promise(calibration: Calibration, chain: Mapping[str, Any] | None, num_prompts: int | None) -> dict[str, Any]:
    """What the chain that vLLM drafts is expected to reach, for `vllm` of report.json.

    Args:
        chain: `chain_figures` of the same answers, where native decoding has written them: they are then expected
            exactly, up to ties, whatever the prompts' kind.
        num_prompts: How many held-out prompts were asked; None for other questions, of which held-out text foretells
            nothing. Without `chain` their rates are taken to scatter as held-out conversations' do.
    """
    found: dict[str, Any] = {}
    if chain:
        found |= {"same_text_acceleration_rate": chain["acceleration_rate"], "standard_error": chain["standard_error"]}
    if num_prompts:
        promise = calibration.chain[calibration.num_speculative_tokens - 1]
        found |= {key: value for key, value in promise.items() if key.startswith("expected_")}
        found.pop("expected_speedup", None)
        if not chain and (error := promise["expected_standard_error"]) is not None:
            found["standard_error"] = rounded(error * math.sqrt(calibration.num_conversations / num_prompts))
    return found
