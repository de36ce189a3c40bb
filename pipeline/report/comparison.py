"""Runs side by side: the settings in which they differ, and what came of them. Is handed data,
opens nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.formatting import UNKNOWN, duration, percent, rate, times
from pipeline.report.facts import (
    Table,
    check_outcome,
    disturbed,
    expected_rate,
    measured_rate,
    on_new_answers,
    pick,
)

NO_RECIPE = {"run", "placement", "limits", "push"}  # sections that no result depends on
LONGEST = 40  # characters of a setting
Report = Mapping[str, Any]


@dataclass(frozen=True)
class ComparedRun:
    """One run: its name, its report as far as it goes, and its resolved configuration as plain
    data.

    `unfinished` names the stages that are still to be made, `heads_bytes` is the size of the
    trained heads, `questions` stands for the prompts of its check: equal where these are equal,
    None where there was no check.
    """

    name: str
    report: Report
    recipe: Mapping[str, Any]
    unfinished: tuple[str, ...] = ()
    heads_bytes: int | None = None
    questions: str | None = None


def comparison(runs: Sequence[ComparedRun]) -> tuple[Table, tuple[str, ...]]:
    """The table, a column for each run, and what a reader should know before comparing the
    columns.
    """
    recipes = [dict(_settings(run)) for run in runs]
    keys = [
        key
        for key in dict.fromkeys(key for recipe in recipes for key in recipe)
        if _differs(key, recipes)
    ]
    rows = [(key, *(recipe.get(key, UNKNOWN) for recipe in recipes)) for key in keys]
    found = [(label, *(cell(run) for run in runs)) for label, cell in FIGURES.items()]
    rows += [row for row in found if any(cell != UNKNOWN for cell in row[1:])]
    columns = ("", *(run.name for run in runs))
    return Table("Runs", columns, tuple(rows), words=(0, *range(1, len(columns)))), tuple(
        _notes(runs)
    )


def _settings(run: ComparedRun) -> Iterator[tuple[str, str]]:
    """A run's settings by dotted key; what `auto` has chosen stands beside it."""
    chosen = pick(run.report, "train", "hyperparameters") or {}
    for section, value in run.recipe.items():
        for key, setting in _flat(value, section) if section not in NO_RECIPE else ():
            name = key.removeprefix("train.")
            beside = (
                f" ({chosen[name]:g})"
                if setting == "auto" and key != name and name in chosen
                else ""
            )
            text = (
                setting
                if isinstance(setting, str)
                else json.dumps(setting, default=str, ensure_ascii=False)
            )
            yield key, f"{text[:LONGEST]}{'…' if len(text) > LONGEST else ''}{beside}"


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}")
    else:
        yield key, value


def _differs(key: str, recipes: Sequence[Mapping[str, str]]) -> bool:
    return len({recipe.get(key) for recipe in recipes}) > 1


def _reached(engine: str) -> Callable[[ComparedRun], str]:
    def cell(run: ComparedRun) -> str:
        figures = pick(run.report, "check", engine)
        return measured_rate(figures) if figures else UNKNOWN

    return cell


def _on_new_answers(engine: str) -> Callable[[ComparedRun], str]:
    """The rate on new answers; unknown where no answer of the run is seen."""

    def cell(run: ComparedRun) -> str:
        figures = pick(run.report, "check", engine)
        return on_new_answers(figures) if pick(figures, "seen_share") else UNKNOWN

    return cell


def _of_time(engine: str, key: str) -> Callable[[ComparedRun], str]:
    """Overhead or speedup; unknown where other load was measured along."""

    def cell(run: ComparedRun) -> str:
        figures = pick(run.report, "check", engine)
        return UNKNOWN if disturbed(figures) else times(pick(figures, key))

    return cell


def _heads(run: ComparedRun) -> str:
    return UNKNOWN if run.heads_bytes is None else f"{run.heads_bytes / 1e6:,.1f} MB"


def _first_head(run: ComparedRun) -> str:
    heads = pick(run.report, "heads") or [{}]
    return percent(heads[0].get("top1"))


FIGURES: dict[str, Callable[[ComparedRun], str]] = {
    "check": lambda run: check_outcome(dict(run.report)).text.removeprefix("check "),
    "head 0's first guess right": _first_head,
    "expected acceleration rate": lambda run: expected_rate(pick(run.report, "tree")),
    "acceleration rate, native": _reached("native"),
    "on new answers, native": _on_new_answers("native"),
    "overhead, native": _of_time("native", "overhead"),
    "speedup, native": _of_time("native", "speedup"),
    "tokens/s with heads, native": lambda run: rate(
        pick(run.report, "check", "native", "tokens_per_second")
    ),
    "tokens/s plain, native": lambda run: rate(
        pick(run.report, "check", "native", "baseline_tokens_per_second")
    ),
    "acceleration rate, vLLM": _reached("vllm"),
    "on new answers, vLLM": _on_new_answers("vllm"),
    "speedup, vLLM": _of_time("vllm", "speedup"),
    "heads": _heads,
    "training": lambda run: duration(pick(run.report, "seconds_by_stage", "train")),
}


def _notes(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """Unfinished runs, missing checks, and what makes figures of two runs no comparison."""
    for run in runs:
        if run.unfinished:
            yield f"{run.name} is unfinished: {', '.join(run.unfinished)}."
        elif not pick(run.report, "check"):
            yield f"{run.name} was not checked: its rates are expected ones."
        elif disturbed(pick(run.report, "check", "native")):
            yield (
                f"{run.name}: other load made a step with heads faster than a plain one; its"
                " speedup is left out."
            )
    checked = [run for run in runs if pick(run.report, "check")]
    questions = (
        ("checked on different questions", [run.questions for run in checked]),
        (
            "checked on different machines",
            [json.dumps(run.report.get("hardware"), sort_keys=True) for run in checked],
        ),
        ("of different targets", [run.report.get("target") for run in runs]),
    )
    for said, values in questions:
        if len(set(values)) > 1:
            apart = "speeds" if "machines" in said else "rates"
            yield f"These runs were {said}: their {apart} do not compare."
