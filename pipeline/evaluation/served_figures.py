"""Figures of decoding methods in vLLM: what each accepts, and its speed at two loads."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.artifacts.check_result import Category, GreedyMatch, LoadRow, ServedMethod
from pipeline.artifacts.json_form import rounded
from pipeline.evaluation.prompts import Prompt, spread
from pipeline.evaluation.speed import check_rate, members_of_categories, range_of
from pipeline.targets.vllm_decode import VLLMTexts

NUM_IN_TURN = 8  # prompts


def served_method(
    name: str,
    config: Mapping[str, Any],
    prompts: Sequence[Prompt],
    texts: VLLMTexts,
    match: GreedyMatch | None,
) -> ServedMethod:
    """Return what a method accepts, or why it failed.

    Args:
        name: The method's name.
        config: Its speculative configuration.
        prompts: The prompts that were decoded.
        texts: What vLLM decoded by this method.
        match: The comparison with plain decoding's text; None for a method that failed.
    """
    if texts.failed:
        return ServedMethod(name=name, speculative_config=dict(config), failed=texts.failed)
    measured = check_rate(prompts, texts.accepted)
    return ServedMethod(
        name=name,
        speculative_config=dict(config),
        acceleration_rate=rounded(measured.rate),
        standard_error=rounded(measured.standard_error),
        greedy_match=match,
        categories=served_categories(prompts, texts.accepted),
    )


def prompts_in_turn(prompts: Sequence[Prompt]) -> list[int]:
    """Choose up to `NUM_IN_TURN` prompts fairly, to be decoded one after another too; by index."""
    return sorted(spread(prompts, NUM_IN_TURN))


def served_categories(
    prompts: Sequence[Prompt], accepted: Sequence[Sequence[int]]
) -> list[Category] | None:
    """Compute a method's acceleration rate for each category of prompts; None for fewer than two.

    Args:
        accepted: Per answer, the number of tokens that each step adds.
    """
    members = members_of_categories(prompts)
    if len(members) < 2:
        return None
    categories = []
    for category, rows in members.items():
        measured = check_rate([prompts[row] for row in rows], [accepted[row] for row in rows])
        found = Category(
            category=category,
            prompts=len(rows),
            acceleration_rate=rounded(measured.rate),
            standard_error=rounded(measured.standard_error),
        )
        categories.append(found)
    return categories


def load_rows_of_check(method: ServedMethod, plain: VLLMTexts, texts: VLLMTexts) -> list[LoadRow]:
    """Return a method's speed with one prompt at a time, and with all prompts at once.

    Each rate covers the prompts that were timed.
    """
    alone = [texts.accepted[row] for row in texts.seconds_in_turn[0]]
    rows = [_load_row(method.name, alone, 1, plain.in_turn(), texts.in_turn())]
    number = len(texts.token_ids)
    if number > 1:
        at_once = plain.at_once(), texts.at_once()
        rows.append(_load_row(method.name, texts.accepted, number, *at_once))
    return rows


def _load_row(
    method: str,
    accepted: Sequence[Sequence[int]],
    requests: int,
    plain: Sequence[float],
    speeds: Sequence[float],
) -> LoadRow:
    """Return the row of a load, given the tokens per second of each repeat.

    Args:
        accepted: Per answer, the number of tokens that each step adds.
    """
    steps = [kept for answer in accepted for kept in answer]
    before = statistics.median(plain)
    after = statistics.median(speeds)
    return LoadRow(
        method=method,
        requests=requests,
        acceleration_rate=round(statistics.fmean(steps), 4) if steps else None,
        speedup=rounded(after / before),
        tokens_per_second=round(after, 2),
        range=range_of(speeds),
        baseline_tokens_per_second=round(before, 2),
        baseline_range=range_of(plain),
    )
