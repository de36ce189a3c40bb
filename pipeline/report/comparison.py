"""Comparison of several runs in one table: settings that differ, and results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.artifacts.tree_file import Expected, TreeFigures
from pipeline.formatting import UNKNOWN, count, duration, percent
from pipeline.report.check_tables import engine_cells
from pipeline.report.facts import expected_rate
from pipeline.report.report import Report
from pipeline.report.speeds import is_disturbed
from pipeline.report.text_table import NOT_RUN, Table

NO_RECIPE = {"run", "placement", "limits", "report", "push"}  # no result depends on these sections
LONGEST = 40  # characters of a setting that are shown
RATE_OF_OWN_TREE = "expected, its own tree"
COMPARED = (
    "acceleration rate",
    "rate on new answers",
    "overhead",
    "speedup",
    "tokens/s, with heads",
    "tokens/s, plain",
)


@dataclass(frozen=True)
class ComparedRun:
    """A run as a column of the comparison, possibly unfinished.

    Attributes:
        recipe: The resolved configuration as plain data.
        unfinished: The stages that have not run.
        questions: A text that is equal for checks with the same prompts; None without a check.
    """

    name: str
    report: Report
    recipe: Mapping[str, Any]
    unfinished: Sequence[str] = ()
    questions: str | None = None


def compare_runs(runs: Sequence[ComparedRun]) -> tuple[Table, list[str]]:
    """Return a table of runs side by side, and notes on what cannot be compared.

    The rows are the settings that differ between runs, and the results that at least one run has.
    """
    columns = ["", *(run.name for run in runs)]
    table = Table("Runs", columns, words=tuple(range(len(columns))))
    settings = [dict(_compared_settings(run)) for run in runs]
    keys = {}
    for one in settings:
        keys.update(dict.fromkeys(one))
    for key in keys:
        values = [one.get(key, UNKNOWN) for one in settings]
        if len(set(values)) > 1:
            table.add(key, *values)
    results = [_compared_results(run) for run in runs]
    for label in results[0]:
        table.add_known(label, *(one[label] for one in results))
        if label == RATE_OF_OWN_TREE:
            _add_equal_sizes(table, "equal tree ({})", [_trees(run.report.tree) for run in runs])
            chains = [_chains(run.report.tree) for run in runs]
            _add_equal_sizes(table, "equal chain ({})", chains)
    return table, _comparison_notes(runs)


def _compared_settings(run: ComparedRun) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the text of each of a run's settings for the comparison.

    Sections that no result depends on are left out. After `auto` in `train` the chosen value is
    added. Long values are cut.
    """
    train = run.report.train
    chosen = (train.hyperparameters if train else None) or {}
    for section, value in run.recipe.items():
        if section in NO_RECIPE:
            continue
        for key, setting in _flat_settings(value, section):
            text = setting
            if not isinstance(setting, str):
                text = json.dumps(setting, default=str, ensure_ascii=False)
            if len(text) > LONGEST:
                text = f"{text[:LONGEST]}…"
            name = key.removeprefix("train.")
            if setting == "auto" and section == "train" and name in chosen:
                text += f" ({chosen[name]:g})"
            yield key, text


def _flat_settings(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each innermost setting, for the comparison of runs."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat_settings(inner, f"{key}.{name}")
    else:
        yield key, value


def _trees(tree: TreeFigures | None) -> dict[int, Expected]:
    """Return what calibration expects of a run's trees, by number of nodes."""
    if tree is None:
        return {}
    return {**{size.nodes: size for size in tree.sizes or []}, tree.nodes: tree}


def _chains(tree: TreeFigures | None) -> dict[int, Expected]:
    """Return what calibration expects of a run's chains, by number of draft tokens."""
    return {length.draft_tokens: length for length in tree.chain} if tree else {}


def _add_equal_sizes(table: Table, label: str, runs: Sequence[Mapping[int, Expected]]) -> None:
    """Add the expected rates at the largest size that all calibrated runs have in common."""
    sizes = [set(rows) for rows in runs if rows]
    common = set.intersection(*sizes) if sizes else set()
    if common:
        size = max(common)
        cells = [expected_rate(rows.get(size)) for rows in runs]
        table.add(f"expected, {label.format(size)}", *cells)


def _compared_results(run: ComparedRun) -> dict[str, str]:
    """Format a run's results for the comparison, by row label.

    The labels are the same for all runs.
    """
    report = run.report
    tree = report.tree
    check = NOT_RUN
    if report.check:
        check = "passed" if report.check.passed else "failed"
    found = {
        "check": check,
        "head 0's first guess right": percent(report.heads[0].top1) if report.heads else UNKNOWN,
        "nodes of its own tree": count(tree.nodes if tree else None),
        "draft tokens of its own chain": count(tree.num_speculative_tokens if tree else None),
        RATE_OF_OWN_TREE: expected_rate(tree),
    }
    cells = engine_cells(report)
    for engine in ("native", "vLLM"):
        for label in COMPARED:
            found[f"{label}, {engine}"] = cells.get(engine, {}).get(label, UNKNOWN)
    found["training"] = duration(report.seconds_by_stage.get("train"))
    return found


def _comparison_notes(runs: Sequence[ComparedRun]) -> list[str]:
    """List notes on the compared runs, such as unfinished ones or different questions."""
    notes = []
    questions, machines, targets = set(), set(), set()
    for run in runs:
        native = run.report.native
        if run.unfinished:
            notes.append(f"{run.name} is unfinished: {', '.join(run.unfinished)}.")
        elif not run.report.check:
            notes.append(f"{run.name} was not checked: its rates are expected ones.")
        elif native and is_disturbed(native):
            notes.append(
                f"{run.name}: the speedup exceeds the acceleration rate, so it is left out. Another"
                " process probably slowed plain decoding."
            )
        targets.add(run.report.target)
        if run.report.check:
            questions.add(run.questions)
            machines.add(json.dumps(run.report.hardware, sort_keys=True))
    for different, what, incomparable in (
        (questions, "questions", "rates"),
        (machines, "machines", "speeds"),
        (targets, "targets", "rates"),
    ):
        if len(different) > 1:
            notes.append(f"These runs have different {what}: their {incomparable} do not compare.")
    return notes
