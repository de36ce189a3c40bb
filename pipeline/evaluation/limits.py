"""Whether checked heads may be published: the measured figures against the limits of the
configuration.

Figures do not depend on limits: a changed limit is applied to the stored figures without decoding
again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipeline.artifacts.check_result import CheckResult
from pipeline.config import CheckConfig, Config
from pipeline.training.methods import method_of

LIMITS = {"min_acceleration_rate", "require_learning", "max_tie_share"}  # in `check`
LEAST_SHORTFALL = 0.1  # tokens per step
LEAST_LEARNED = 0.1  # of the tokens that guessing by frequency misses


def failures(result: CheckResult, config: Config) -> list[str]:
    """The reasons why these heads must not be published; empty when they may.

    The limits are `check.min_acceleration_rate`, `check.require_learning` (see
    `guesses_by_frequency`) and, where the backbone is tuned, `train.backbone.max_kl`.
    """
    found = engine_failures(result, config.check)
    if copy := result.served_model:
        found += [
            f"on {copy['model']}: {reason}"
            for reason in engine_failures(CheckResult.of(copy), config.check)
        ]
    if config.check.require_learning and (rank := guesses_by_frequency(result)):
        accuracy, frequency = (
            f"{shares[rank]:.1%}" for shares in (result.head_0 or {}, result.frequency or {})
        )
        found.append(
            "the heads have learned hardly anything: on held-out text head 0's"
            f" {rank.replace('top', 'top-')} accuracy is {accuracy}, and always guessing the most"
            f" frequent tokens would reach {frequency}: heads have to get {LEAST_LEARNED:.0%} of"
            " what that misses"
        )
    if method_of(config.train).tunes_backbone:
        kl, most = math.nan if result.kl is None else result.kl, config.train.backbone.max_kl
        if not kl <= most:
            found.append(
                f"the tuned backbone is {kl:.4f} nats from the target, above train.backbone.max_kl"
                f" = {most:g}"
            )
    return found


def engine_failures(result: CheckResult, settings: CheckConfig) -> list[str]:
    """Those that the engines' figures show, whoever made the heads."""
    least = settings.min_acceleration_rate
    found = []
    for name, engine in result.engines.items():
        if engine.differing:
            differ = (
                f"{name}: {engine.differing} of {engine.sequences} greedy sequences differ from"
                " plain decoding"
            )
            found.append(differ + _beyond_ties(engine.figures))
        if engine.ties > max(1, settings.max_tie_share * engine.sequences):
            found.append(
                f"{name}: {engine.ties} of {engine.sequences} greedy sequences differ at ties, more"
                f" than check.max_tie_share = {settings.max_tie_share:g} of them"
            )
        if not engine.acceleration_rate >= least:
            rate = f"acceleration rate {engine.acceleration_rate:.2f}"
            found.append(f"{name}: {rate} is below check.min_acceleration_rate = {least:.2f}")
        if not engine.accepts_drafts:
            found.append(f"{name}: no draft token was accepted")
    if (vllm := result.engines.get("vllm")) and (expected := falls_short(vllm.figures)):
        found.append(
            f"vllm: acceleration rate {vllm.acceleration_rate:.2f} is far below the {expected:.2f}"
            " to expect of this chain: vLLM does not draft what was trained"
        )
    return found


def _beyond_ties(figures: Mapping[str, Any]) -> str:
    """How far from a tie the sequences differ, and the setting that says what one is."""
    gap, tolerance = figures.get("largest_gap"), figures.get("tie_tolerance")
    if gap is None or tolerance is None:
        return ""
    return (
        f", where the target's top-2 gap is up to {gap:g}; up to check.tie_tolerance ="
        f" {tolerance:g} it is a tie"
    )


def falls_short(vllm: Mapping[str, Any]) -> float | None:
    """The rate to expect of the served chain where vLLM's is far below it; None where it is not.

    Far is at least half of the gain over plain decoding, and more than 3 standard errors of what
    was measured and expected together, and a tenth of a token. On the same text there is no
    sampling error: native decoding has written the answers, and the chain was walked through them.
    Prompts and engines differ by less than half of the gain; heads that an engine has read wrongly
    gain next to nothing. A rate above the expected one is as good.
    """
    error, expected = 0.0, vllm.get("same_text_acceleration_rate")
    if expected is None:
        expected = vllm.get("expected_acceleration_rate")
        measured_error, expected_error = (
            vllm.get("standard_error"),
            vllm.get("expected_standard_error"),
        )
        if expected is None or measured_error is None or expected_error is None:
            return None
        error = math.hypot(measured_error, expected_error)
    shortfall = expected - vllm["acceleration_rate"]
    return expected if shortfall > max((expected - 1) / 2, 3 * error, LEAST_SHORTFALL) else None


def guesses_by_frequency(result: CheckResult) -> str | None:
    """The first of top1 and top5 in which head 0 is hardly better than guessing by frequency; None
    where it is in both.

    Head 0 guesses the token after the next; the most that guesses which read nothing can reach
    there is the share of the most frequent tokens. Of what those miss it has to get `LEAST_LEARNED`
    right. Untrained heads get nothing, those of a few steps a twentieth, heads worth serving a
    third and more, whatever the target and its vocabulary. Text of which frequency guesses
    everything says nothing.
    """
    head, frequency = result.head_0, result.frequency
    if not head or not frequency:
        return None
    ranks = [rank for rank in ("top1", "top5") if rank in head and rank in frequency]
    missed = {rank: 1 - frequency[rank] for rank in ranks if frequency[rank] < 1}
    return next(
        (rank for rank in missed if head[rank] - frequency[rank] < LEAST_LEARNED * missed[rank]),
        None,
    )
