"""Decoding methods in vLLM that the heads are compared with: drafts that cost no training.

    ngram        the tokens that followed the last tokens of the context, where these occurred
                 before (prompt lookup)
    draft-model  a smaller model with the same vocabulary (`check.assistant_model`)
    suffix       a suffix tree of the context (SuffixDecoding, package arctic-inference)
    heads, N     the heads with another number of draft tokens (`check.draft_tokens`)

Every method writes the target's greedy text. A method that fails is left out with its reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.artifacts.check_result import GreedyMatch, ServedMethod, Throughput
from pipeline.artifacts.json_form import rounded
from pipeline.evaluation.prompts import CheckRequest, Prompt
from pipeline.evaluation.speed import check_rate
from pipeline.export.layout import Content, read_layout
from pipeline.targets.vllm_decode import VLLMTexts

DRAFTED = 4  # tokens per step of a method without heads
LONGEST_NGRAM = 3
LONGEST_SUFFIX_DRAFT = 32
PLAIN = "plain"
HEADS = "heads"


def heads_config(request: CheckRequest) -> Content:
    """Return vLLM's speculative configuration of the checked heads."""
    if request.speculative_config is not None:
        return dict(request.speculative_config)
    layout = read_layout(request.export)
    export = str(request.export.resolve())
    return layout.kind.speculative_config(export, layout.num_speculative_tokens)


def compared_configs(request: CheckRequest) -> dict[str, Content]:
    """Return vLLM's speculative configuration of each method to compare with, by its name."""
    settings = request.settings
    own = heads_config(request)
    found = {}
    for number in settings.draft_tokens:
        if number != own["num_speculative_tokens"]:
            found[f"{HEADS}, {number}"] = {**own, "num_speculative_tokens": number}
    for name in settings.engine_baselines:
        if name == "ngram":
            config: Content = {
                "method": "ngram",
                "num_speculative_tokens": DRAFTED,
                "prompt_lookup_max": LONGEST_NGRAM,
                "prompt_lookup_min": 1,
            }
        elif name == "draft-model":
            assert request.assistant is not None, "CheckConfig asks for both"
            config = {
                "method": "draft_model",
                "model": request.assistant.model,
                "num_speculative_tokens": DRAFTED,
            }
        else:
            config = {"method": "suffix", "num_speculative_tokens": LONGEST_SUFFIX_DRAFT}
        found[name] = config
    return found


def served_method(
    name: str,
    config: Mapping[str, Any] | None,
    prompts: Sequence[Prompt],
    texts: VLLMTexts,
    match: GreedyMatch | None,
) -> ServedMethod:
    """Return what a method accepts and how fast it is.

    Args:
        name: The method's name.
        config: Its speculative configuration; None for plain decoding.
        prompts: The prompts that were decoded.
        texts: What vLLM decoded.
        match: The comparison with plain decoding's text; None for plain decoding.
    """
    if texts.failed:
        return ServedMethod(name=name, failed=texts.failed)
    throughput = [_throughput(1, texts.num_tokens_in_turn, texts.seconds_in_turn)]
    if len(prompts) > 1:
        throughput.append(_throughput(len(prompts), texts.num_tokens, texts.seconds))
    if config is None:
        return ServedMethod(name=name, throughput=throughput)
    measured = check_rate(prompts, texts.accepted)
    return ServedMethod(
        name=name,
        draft_tokens=config["num_speculative_tokens"],
        speculative_config=dict(config),
        acceleration_rate=rounded(measured.rate),
        standard_error=rounded(measured.standard_error),
        greedy_match=match,
        categories=_rates_by_category(prompts, texts.accepted),
        throughput=throughput,
    )


def _throughput(requests: int, num_tokens: int, seconds: Sequence[float]) -> Throughput:
    """Return tokens per second with so many requests at once, given each repeat's seconds."""
    lowest = None
    highest = None
    if len(seconds) > 1:
        lowest = round(num_tokens / max(seconds), 2)
        highest = round(num_tokens / min(seconds), 2)
    return Throughput(
        requests=requests,
        tokens_per_second=round(num_tokens / statistics.median(seconds), 2),
        lowest=lowest,
        highest=highest,
    )


def _rates_by_category(
    prompts: Sequence[Prompt], accepted: Sequence[Sequence[int]]
) -> dict[str, float] | None:
    """Compute the acceleration rate of each category of prompts; None for fewer than two."""
    places: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        if prompt.category and accepted[place]:
            places.setdefault(prompt.category, []).append(place)
    if len(places) < 2:
        return None
    rates = {}
    for category, chosen in places.items():
        found = check_rate([prompts[at] for at in chosen], [accepted[at] for at in chosen])
        rates[category] = round(found.rate, 4)
    return rates
