"""Title and outcomes of a report, and the formats of its figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifacts.check_result import (
    EngineFigures,
    GreedyMatch,
    Speed,
    VllmFigures,
)
from pipeline.artifacts.seen_answers import NewAnswers
from pipeline.artifacts.tree_file import Expected, TreeFigures
from pipeline.formatting import (
    UNKNOWN,
    count,
    percent,
    times,
    with_error,
)
from pipeline.report.report import Report
from pipeline.report.speeds import Repeats, is_disturbed

ENOUGH_PROMPTS = 16  # decoded by the check
MANY_SEEN = 0.25  # share of the check's answers that are in the training text as well

Prediction = Expected | TreeFigures | VllmFigures | NewAnswers


@dataclass(frozen=True)
class Outcome:
    """A verdict in a report, good or bad; None is a warning, or that nothing was checked."""

    is_good: bool | None
    text: str
    failures: tuple[str, ...] = ()


def report_title(report: Report) -> str:
    """Return the title of a report: the run's name."""
    return report.run.name if report.run else "Unnamed run"


def report_subtitle(report: Report) -> str:
    """Return the subtitle of a report: heads, recipe, target and date, as far as known.

    A target in a local directory is called by the directory's name.
    """
    parts = [report.drafter]
    if report.train and report.train.recipe:
        parts.append(f"{report.train.recipe} recipe")
    if report.target:
        target = Path(report.target)
        parts.append(f"target {target.name if target.is_absolute() else target}")
    if report.run:
        parts.append(report.run.date)
    return ", ".join(part for part in parts if part)


def check_outcome(report: Report) -> Outcome:
    """Return the outcome of a report's check: passed, failed with its failures, or not run.

    A passed check states how many greedy sequences of all engines differ at a tie, if any does.
    """
    if not report.check:
        return Outcome(None, "Check not run")
    if not report.check.passed:
        return Outcome(False, "Check failed", tuple(report.check.failures))
    text = "Check passed: greedy text as without heads"
    ties = sequences = 0
    for engine in (report.native, report.vllm):
        if engine:
            ties += engine.greedy_match.ties
            sequences += engine.greedy_match.sequences
    if ties:
        text += f", except {ties} of {sequences} sequences at ties"
    return Outcome(True, text)


def speed_outcomes(report: Report) -> list[Outcome]:
    """Return what the heads gain in each engine whose speed is known and not disturbed.

    That in vLLM is left out if the study `load` measured its server.
    """
    found: dict[str, Speed] = {}
    if report.native and not is_disturbed(report.native):
        found["natively"] = report.native
    if report.vllm and not report.studies.load:  # whose list of what to serve says more
        number = count(report.vllm.greedy_match.sequences)
        found[f"in vLLM, {number} prompts at once"] = report.vllm
    outcomes = []
    for where, speed in found.items():
        heads, plain = Repeats.of_heads(speed), Repeats.of_plain(speed)
        if not heads.speed or not plain.speed:
            continue
        text = f"{heads.over(plain)} {where} ({heads.range_over(plain)})"
        if heads.is_single or plain.is_single:
            outcomes.append(Outcome(None, text))
        elif heads.overlaps(plain):
            outcomes.append(Outcome(None, f"{text}: within the repeats of plain decoding"))
        elif heads.speed > plain.speed:
            outcomes.append(Outcome(True, f"{text}: faster with heads"))
        else:
            outcomes.append(Outcome(None, f"{text}: slower with heads"))
    return outcomes


def expected_rate(prediction: Prediction | None) -> str:
    """Format an expected acceleration rate with its standard error: `4.03 ± 0.32`, or `-`."""
    if not prediction:
        return UNKNOWN
    error = prediction.expected_standard_error
    return with_error(prediction.expected_acceleration_rate, error)


def measured_rate(engine: EngineFigures | NewAnswers | None) -> str:
    """Format a measured acceleration rate with its standard error: `4.03 ± 0.32`, or `-`."""
    if not engine:
        return UNKNOWN
    return with_error(engine.acceleration_rate, engine.standard_error)


def on_new_answers(engine: EngineFigures | None) -> str:
    """Format an engine's acceleration rate on the answers that are not in the training text.

    It is `-` if all answers are new or this is unknown, and states the number of new answers if
    they are too few for a rate.
    """
    if not engine or not engine.seen_share or not engine.new:
        return UNKNOWN
    if engine.new.acceleration_rate is None:
        return f"only {count(engine.new.answers)} new answers"
    return measured_rate(engine.new)


def speedup_of(found: Speed | None) -> str:
    """Format a speedup with the range of its repeats, if known: `1.42x (1.35 to 1.50)`, or `-`."""
    if not found or found.range is None or found.baseline_range is None:
        return times(found.speedup if found else None)
    ranges = Repeats.of_heads(found).range_over(Repeats.of_plain(found))
    return f"{times(found.speedup)} ({ranges})"


def rough_note(engine: EngineFigures) -> str:
    """Say why the figures of a check are rough, and what to do; an empty text if they are not."""
    reasons = []
    if engine.greedy_match.sequences < ENOUGH_PROMPTS:
        reasons.append(f"the check decoded {count(engine.greedy_match.sequences)} prompts")
    if (engine.seen_share or 0) > MANY_SEEN:
        reasons.append(f"{percent(engine.seen_share)} of its answers are in the training text")
    if not reasons:
        return ""
    return (
        f"Rough figures: {', and '.join(reasons)}. Check with 32 or more new questions like those"
        " of your users (`check HEADS --prompts FILE`; in a run, check.prompts=FILE and"
        " seeds.decontaminate=false)."
    )


def greedy_matches(match: GreedyMatch | None) -> str:
    """Format how many greedy sequences equal plain decoding: `31/32`, or `-` if unknown."""
    if not match:
        return UNKNOWN
    return f"{count(match.identical)}/{count(match.sequences)}"


def greedy_ties(engine: EngineFigures) -> str:
    """Format the ties, the greedy tokens compared and the tolerance: `1 of 2,048 within 0.12`."""
    match = engine.greedy_match
    text = f"{count(match.ties)} of {count(match.tokens)} tokens"
    if engine.tie_tolerance is not None:
        text += f" within {engine.tie_tolerance:.2g}"
    return text


def pairs(value: Any) -> str:
    """Format a value for one cell of a report's table.

    A dictionary becomes `name value, name value` without values that are None, a list is joined by
    commas, and None becomes an empty text.
    """
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
