"""The served check: the export decoded by vLLM, against vLLM without it.

vLLM is started as `vllm serve EXPORT` starts it, with the export as its only model, wherever that
names the target that is checked; else with the two named apart.

vLLM proposes the chain of the heads' top-1 guesses, never a tree, so its acceleration rate is lower
than the native one. It is counted by the same rule: tokens kept over forwards of the target, after
the prefill and its token.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.artifacts.tree_file import Calibration
from pipeline.decoding.held_out import rate_of_answers
from pipeline.evaluation.answers import compare, tie_tolerance, top_2_gap
from pipeline.evaluation.prompts import CheckRequest, conversations_of
from pipeline.evaluation.speed import rate_on_new_answers, require_steps, rounded
from pipeline.execution.progress import ProgressReporter
from pipeline.export.layout import read_layout
from pipeline.targets.loading import load_causal_lm
from pipeline.targets.vllm_decode import decode_in_vllm
from pipeline.targets.vllm_engine import in_vllm

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_served(request: CheckRequest, progress: ProgressReporter | None = None) -> dict[str, Any]:
    """Decode every prompt greedily in vLLM, without the heads and with them.

    Returns:
        `vllm` of report.json, and the `differing` sequences that are not ties.

    Raises:
        ConfigError: No answer took a step.
    """
    settings, prompts, gpus = request.settings, request.prompts, request.gpus
    target = in_vllm(request.target, on_gpu=gpus > 0)  # in whose dtype a tie is a tie
    with_heads, num_tokens = drafting(request)
    if progress:
        progress.begin("vLLM starts", 0)
    plain, accelerated = decode_in_vllm(
        target,
        [{}, with_heads],
        [prompt.ids for prompt in prompts],
        settings.max_new_tokens,
        repeats=settings.repeats,
        gpus=gpus,
        told=progress.report if progress else None,
    )
    require_steps(accelerated.accepted)
    found = rate_of_answers(accelerated.accepted, conversations_of(prompts))

    @functools.cache
    def model() -> PreTrainedModel:  # loaded only where sequences differ
        return load_causal_lm(target, "cuda" if gpus else "cpu", max(1, gpus))

    texts = plain.token_ids, accelerated.token_ids
    tolerance = tie_tolerance(target, settings, on_gpu=gpus > 0)
    match = compare(prompts, *texts, lambda prefix: top_2_gap(model(), prefix), tolerance)
    on_new: dict[str, Any] = {}
    if request.trained is not None:
        seen = request.trained.answers()
        on_new = rate_on_new_answers(prompts, accelerated.token_ids, accelerated.accepted, seen)
    return {
        "vllm": {
            "num_speculative_tokens": num_tokens,
            "export_alone": "model" in with_heads,
            "acceleration_rate": rounded(found.rate),
            "standard_error": rounded(found.standard_error),
            "accepted_per_position": accepted_per_position(accelerated.accepted, num_tokens),
            "speedup": round(accelerated.tokens_per_second / plain.tokens_per_second, 4),
            "tokens_per_second": round(accelerated.tokens_per_second, 2),
            "baseline_tokens_per_second": round(plain.tokens_per_second, 2),
            "model_runners": {
                "plain": plain.model_runner,
                "with heads": accelerated.model_runner,
            },
            "greedy_match": match.as_dict(),
            "tie_tolerance": tolerance,
            **match.largest_gap(),
            **on_new,
        },
        "differing": match.differing,
    }


def accepted_per_position(accepted: Sequence[Sequence[int]], num_tokens: int) -> list[float]:
    """The share of steps that keep at least 1, 2, … of `num_tokens` drafted tokens.

    A step that adds n tokens counts as n - 1 kept drafts and one token of the target's own, so that
    1 and the sum of the shares are the acceleration rate. Where the text ends within a step, what
    lies beyond is not counted.
    """
    steps = [kept for answer in accepted for kept in answer]
    return [
        round(sum(kept > depth for kept in steps) / len(steps), 4)
        for depth in range(1, num_tokens + 1)
    ]


def drafting(request: CheckRequest) -> tuple[dict[str, Any], int]:
    """The arguments that start vLLM with the heads, and how many tokens they draft."""
    if config := request.speculative_config:
        return {"speculative_config": dict(config)}, config["num_speculative_tokens"]
    layout = read_layout(request.export)
    return layout.engine_args(request.export, request.target.model), layout.num_speculative_tokens


def chain_promise(
    calibration: Calibration, chain: Mapping[str, Any] | None, *, of_one_kind: bool
) -> dict[str, Any]:
    """What the chain that vLLM drafts is expected to reach, for `vllm` of report.json.

    Args:
        chain: `chain_figures` of the same answers, where native decoding has written them: vLLM is
            expected to reach its rate up to ties, whatever the prompts' kind.
        of_one_kind: Whether the prompts are of the kind of calibration's text, which foretells
            nothing of others.
    """
    found: dict[str, Any] = {}
    if chain:
        found["same_text_acceleration_rate"] = chain["acceleration_rate"]
    if of_one_kind:
        promise = calibration.chain[calibration.num_speculative_tokens - 1]
        found |= {
            key: promise[key] for key in ("expected_acceleration_rate", "expected_standard_error")
        }
        found["new"] = promise["new"]
    return found
