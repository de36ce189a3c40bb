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
NUM_OF_CATEGORY = 4


def served_method(
    name: str,
    config: Mapping[str, Any],
    prompts: Sequence[Prompt],
    plain: VLLMTexts,
    texts: VLLMTexts,
    match: GreedyMatch | None,
) -> ServedMethod:
    """Return what a method accepts, or why it failed.

    Args:
        name: The method's name.
        config: Its speculative configuration.
        prompts: The prompts that were decoded.
        plain: What vLLM decoded without drafts.
        texts: What it decoded by this method.
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
        categories=served_categories(prompts, plain, texts),
    )


def prompts_in_turn(prompts: Sequence[Prompt]) -> list[int]:
    """Choose the prompts that are also decoded one after another, by index.

    They are up to `NUM_OF_CATEGORY` of each category; with fewer than two categories up to
    `NUM_IN_TURN`. Each is of another conversation.
    """
    members = members_of_categories(prompts)
    if len(members) < 2:
        return sorted(spread(prompts, NUM_IN_TURN))
    chosen = []
    for rows in members.values():
        of_category = [prompts[row] for row in rows]
        chosen += sorted(rows[place] for place in spread(of_category, NUM_OF_CATEGORY))
    return chosen


def served_categories(
    prompts: Sequence[Prompt], plain: VLLMTexts, texts: VLLMTexts
) -> list[Category]:
    """Compute a method's rate and speed for each category of prompts, decoded one after another.

    The rate and its standard error are those of all prompts of the category; they are None if every
    answer ended with its first token. With fewer than two categories there is nothing to compare.
    """
    members = members_of_categories(prompts)
    categories: list[Category] = []
    if len(members) < 2:
        return categories
    for category, rows in members.items():
        measured = check_rate([prompts[row] for row in rows], [texts.accepted[row] for row in rows])
        speed = statistics.median(texts.in_turn(rows))
        baseline = statistics.median(plain.in_turn(rows))
        categories.append(
            Category(
                category=category,
                prompts=len(rows),
                acceleration_rate=rounded(measured.rate),
                standard_error=rounded(measured.standard_error),
                speedup=rounded(speed / baseline),
                tokens_per_second=round(speed, 2),
                baseline_tokens_per_second=round(baseline, 2),
            )
        )
    return categories


def load_rows_of_check(method: ServedMethod, plain: VLLMTexts, texts: VLLMTexts) -> list[LoadRow]:
    """Return a method's speed with one prompt at a time, and with all prompts at once.

    Each rate is that of the prompts that were timed.
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
