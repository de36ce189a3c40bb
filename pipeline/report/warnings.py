"""What a reader of a report should notice although the check passed, shared by the terminal,
Markdown and HTML.
"""

from __future__ import annotations

import math
from typing import Any

from pipeline.formatting import count, percent, ratio, times
from pipeline.report.facts import disturbed, pick

SAME_TEXT_GAP = 0.1  # of the gain over plain decoding
NOTABLE_GAP = 3  # standard errors between the expected acceleration rate and the measured one
ENOUGH_COVERAGE = 0.9  # of held-out text by the draft vocabulary


def warnings(report: dict) -> tuple[str, ...]:
    """What a reader should notice although the check passed."""
    found = list(pick(report, "seeds", "warnings") or [])
    found += pick(report, "train", "warnings") or []
    if pick(report, "train", "best_step") == 0:
        found.append(
            f"None of {count(pick(report, 'train', 'steps'))} steps lowered the held-out loss: what"
            " is written is the state that training began with, of a second stage the first one's"
            " heads and the target as it was. Lower train.lr, or give more seeds."
        )
    if contaminated := pick(report, "check", "contaminated_rows"):
        found.append(
            f"{count(contaminated)} training rows hold a question of the check, so its rates may be"
            " too high: with seeds.decontaminate, and this file of questions from the start, they"
            " are left out."
        )
    found += _disturbed_timings(report)
    if (
        coverage := pick(report, "train", "draft_coverage")
    ) is not None and coverage < ENOUGH_COVERAGE:
        found.append(
            f"Only {percent(coverage)} of held-out text is in the draft vocabulary, and any other"
            " token ends what can be accepted: raise train.draft_vocab."
        )
    found += _speedups(report)
    native, vllm = pick(report, "check", "native"), pick(report, "check", "vllm")
    if pick(native, "acceptance") in (None, "greedy"):  # calibration expects greedy decoding
        found += _gap("The measured acceleration rate", native, pick(report, "tree"))
    found += _gap("vLLM's acceleration rate", vllm, vllm)
    served, same_text = (
        pick(vllm, key) for key in ("acceleration_rate", "same_text_acceleration_rate")
    )
    if (
        same_text is not None
        and served is not None
        and same_text - served > SAME_TEXT_GAP * (same_text - 1)
    ):
        found.append(
            f"vLLM's acceleration rate is {ratio(served)}, and the same chain reaches"
            f" {ratio(same_text)} natively on the same text: vLLM may compute the heads in another"
            " precision or not as they were trained, or draft nothing near the end of the context."
        )
    return tuple(found)


def _disturbed_timings(report: dict) -> list[str]:
    """What other load on the machine has made untrue, by the look of it."""
    found = []
    for name, engine in (
        ("", pick(report, "check", "native")),
        ("vLLM: ", pick(report, "check", "vllm")),
    ):
        if disturbed(engine):
            found.append(
                f"{name}A step with heads was measured as faster than a plain one, although it does"
                " more: other load probably slowed the plain steps, and the speedup of"
                f" {times(pick(engine, 'speedup'))} at an acceleration rate of"
                f" {ratio(pick(engine, 'acceleration_rate'))} is too high; `--fresh check` measures"
                " again."
            )
    return found


def _speedups(report: dict) -> list[str]:
    """Whether the heads pay off on this device, as calibration expected and as the check
    measured.
    """
    promises = [
        speedup
        for size in pick(report, "tree", "sizes") or []
        if (speedup := size.get("expected_speedup"))
    ]
    speedup = pick(report, "check", "native", "speedup")
    if not promises or max(promises) >= 1:
        slower = speedup is not None and speedup < 1
        said = (
            "Decoding is slower with the heads than without them: the measured speedup is"
            f" {times(speedup)}."
        )
        return [said] if slower else []
    best = times(max(promises))
    if speedup is None or speedup < 1:
        return [
            "The tree does not pay off on this device: no expected speedup is above 1, the best"
            f" {best}."
        ]
    return [
        f"Calibration expected no speedup above 1, the best {best}, and the check measured"
        f" {times(speedup)}: other load probably disturbed one of them, and the tree's size may be"
        " wrong; `--fresh calibrate` measures again."
    ]


def _both_rates(measured: Any, promise: Any) -> tuple[float, float, float, float] | None:
    """The measured rate, its standard error, the expected rate, its standard error; None where one
    is not known.
    """
    rate, error = pick(measured, "acceleration_rate"), pick(measured, "standard_error")
    expected, expected_error = (
        pick(promise, "expected_acceleration_rate"),
        pick(promise, "expected_standard_error"),
    )
    if None in (rate, error, expected, expected_error):
        return None
    return rate, error, expected, expected_error


def _gap(name: str, measured: Any, promise: Any) -> list[str]:
    """The warning of a rate that is beyond `NOTABLE_GAP` standard errors of what was measured and
    expected together.
    """
    on_all = _both_rates(measured, promise)
    on_new = _both_rates(pick(measured, "new"), pick(promise, "new"))
    figures = on_new or on_all  # of the same kind: how many answers are seen may differ
    if figures is None:
        return []
    rate, error, expected, expected_error = figures
    both = math.hypot(error, expected_error)
    if abs(rate - expected) <= NOTABLE_GAP * both:
        return []
    side = "above" if rate > expected else "below"
    errors = f", {abs(rate - expected) / both:.1f} standard errors" if both else ""
    return [
        f"{name} is {abs(rate / expected - 1):.0%} {side} the expected one{errors}: the check's"
        " prompts may differ in kind from the text that it was expected of."
    ]
