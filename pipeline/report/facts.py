"""A report's title, outcome and headline figures, shared by the terminal, Markdown and HTML.

Every form shows the same `Figure`s and `Table`s. Every part of a report is optional, since a run
may be unfinished; missing parts read "not run".
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from pipeline.formatting import (
    NOT_RUN,
    UNKNOWN,
    count,
    percent,
    rate,
    ratio,
    signed_percent,
    times,
    with_error,
)

STAGES = ("seeds", "generate", "features", "train", "calibrate", "export", "check", "push")

# Names in the study of trees.
STOCK_TREE, SEARCHED_TREE, USED_TREE = "stock (Vicuna-7B's)", "searched, stock size", "the export's"
DYNAMIC_TREE, STATIC_TREE = (
    "dynamic, the export's size",
    "searched, the export's size",
)  # beside the other kind
USED_DYNAMIC_TREE = "the export's, dynamic"

_ORDER = (
    "run", "target", "method", "num_heads", "drafter", *STAGES[:4], "heads", "tree", "check",
    "target_text", "quarantine", "hardware", "versions", "seconds_by_stage",
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One headline figure: its name, its value as text, and what it means in a few words."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Table:
    """A table of text; `empty` is shown where it has no rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    empty: str = NOT_RUN
    words: tuple[int, ...] = (0,)  # text columns; the others are numbers, aligned to the right
    shares: tuple[float, ...] = ()  # per row, a bar's share of the largest


@dataclass(frozen=True)
class CheckOutcome:
    """Whether the check passed; None where it was not run."""

    passed: bool | None
    text: str
    failures: tuple[str, ...] = ()


def finite(value: Any) -> Any:
    """`value` as JSON allows it: non-finite numbers become None, arrays lists, other objects their
    text.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)  # a StrEnum too
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        return finite(value.tolist())
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def in_order(report: dict) -> dict:
    """The report with its parts in reading order; unknown parts come last, by name."""
    known = [key for key in _ORDER if key in report]
    return {key: report[key] for key in [*known, *sorted(report.keys() - set(known))]}


def pick(report: Any, *path: str) -> Any:
    """The value at a path of keys, None where any of them is missing."""
    for key in path:
        report = report.get(key) if isinstance(report, dict) else None
    return report


def expected_rate(promise: Any) -> str:
    """The expected acceleration rate with its standard error: `4.03 ± 0.32`."""
    return with_error(
        pick(promise, "expected_acceleration_rate"), pick(promise, "expected_standard_error")
    )


def measured_rate(engine: Any) -> str:
    """The measured acceleration rate with its standard error."""
    return with_error(pick(engine, "acceleration_rate"), pick(engine, "standard_error"))


def on_new_answers(part: Any) -> str:
    """The rate on answers that the target has not written in training rows, of an engine or of the
    tree's promise.
    """
    new = pick(part, "new")
    if new is None:
        return UNKNOWN
    if "expected_acceleration_rate" in new and "acceleration_rate" not in new:
        return expected_rate(new)
    if "acceleration_rate" in new:
        return measured_rate(new)
    return f"only {count(new['answers'])} new answers"


def has_seen_answers(report: dict) -> bool:
    """Whether any held-out answer is one that the target has also written in a training row."""
    parts = (pick(report, "tree"), pick(report, "check", "native"), pick(report, "check", "vllm"))
    return any(pick(part, "seen_share") for part in parts)


def title(report: dict) -> str:
    """The title line."""
    return f"Heads for {pick(report, 'target') or 'an unnamed target'}"


def subtitle(report: dict) -> str:
    """Method, heads, run and date, as far as known."""
    name, date = pick(report, "run", "name"), pick(report, "run", "date")
    method = ", ".join(filter(None, (pick(report, "method"), pick(report, "train", "recipe"))))
    parts = [method, pick(report, "drafter"), name and f"run {name}", date]
    return ", ".join(str(part) for part in parts if part)


def check_outcome(report: dict) -> CheckOutcome:
    """Whether the check passed, and its failures as sentences."""
    passed = pick(report, "check", "passed")
    failures = tuple(str(failure) for failure in pick(report, "check", "failures") or ())
    if passed is None and not failures:
        return CheckOutcome(None, "check not run")
    if failures or not passed:
        return CheckOutcome(False, "check failed", failures)
    return CheckOutcome(True, "check passed")


def disturbed(engine: Any) -> bool:
    """Whether a step with heads was measured as faster than a plain one, though it does more: no
    speedup follows.
    """
    overhead, speedup, reached = (
        pick(engine, key) for key in ("overhead", "speedup", "acceleration_rate")
    )
    return (
        overhead < 1
        if overhead is not None
        else None not in (speedup, reached) and speedup > reached
    )


def headline(report: dict) -> list[Figure]:
    """The headline figures, in the paper's terms (section 3 and appendix B)."""
    native, vllm, text = (
        pick(report, "check", "native"),
        pick(report, "check", "vllm"),
        pick(report, "target_text"),
    )
    matched, matched_note = identical(pick(native, "greedy_match"))
    expected = f"; {expected_rate(pick(report, 'tree'))} expected" if pick(report, "tree") else ""
    entropy = f"distinct-4; mean entropy {ratio(pick(text, 'mean_entropy_nats'))} nats"
    untrue = disturbed(native)
    overhead, speedup = (
        UNKNOWN if untrue else times(pick(native, key)) for key in ("overhead", "speedup")
    )
    doubt = "; measured beside other load, see the warning" if untrue else ""
    figures: tuple[tuple[Any, str, str, str], ...] = (
        (
            native,
            "Acceleration rate",
            measured_rate(native),
            f"tokens per target forward, with the tree{expected}",
        ),
        (native, "Overhead", overhead, f"seconds of a step with heads over a plain one{doubt}"),
        (native, "Speedup", speedup, f"acceleration rate over overhead{doubt}"),
        (native, "Greedy identical", matched, matched_note),
        (
            vllm,
            "vLLM acceleration rate",
            measured_rate(vllm),
            _vllm_note(vllm),
        ),
        (
            text,
            "Target's own text",
            ratio(pick(text, "distinct_4")),
            entropy if text else "distinct-4, mean entropy",
        ),
        (
            native,
            "Tokens/s, plain",
            rate(pick(native, "baseline_tokens_per_second")),
            "the target alone, same prompts",
        ),
        (
            native,
            "Tokens/s, with heads",
            rate(pick(native, "tokens_per_second")),
            "the target with its heads",
        ),
    )
    found = [
        Figure(label, value if part else NOT_RUN, note) for part, label, value, note in figures
    ]
    return found[:1] + _on_new_answers(report) + _searched_over_stock(native) + found[1:]


def _on_new_answers(report: dict) -> list[Figure]:
    """Each engine's rate on new answers alone; nothing where no answer is seen."""
    figures = []
    promises = {"native": pick(report, "tree"), "vllm": pick(report, "check", "vllm")}
    for name, label in (("native", "On new answers"), ("vllm", "On new answers, vLLM")):
        engine = pick(report, "check", name)
        if not pick(engine, "seen_share"):
            continue
        expected = expected_rate(pick(promises[name], "new"))
        note = f"{percent(engine['seen_share'])} of the answers are in the training text as well"
        if expected != UNKNOWN:
            note += f"; {expected} expected"
        figures.append(Figure(label, on_new_answers(engine), note))
    return figures


def _searched_over_stock(native: Any) -> list[Figure]:
    """The gain of the searched tree over the tree of the authors' code, where the study of trees
    was run.
    """
    rows = pick(native, "studies", "trees") or []
    rates = {row.get("tree"): row.get("acceleration_rate") for row in rows}
    stock, searched = rates.get(STOCK_TREE), rates.get(SEARCHED_TREE)
    used = rates.get(USED_TREE, rates.get(USED_DYNAMIC_TREE))
    if not stock or not searched:
        return []
    note = (
        f"stock tree {ratio(stock)}, searched tree of the same size {ratio(searched)}, used tree"
        f" {ratio(used)}"
    )
    return [
        Figure(
            "Search over stock tree",
            signed_percent(searched / stock - 1),
            f"acceleration rate: {note}",
        )
    ]


def identical(match: Any) -> tuple[str, str]:
    """How many greedy sequences equal plain decoding, as `31/32`, and a note on those that differ
    at a tie.
    """
    sequences, equal, ties = (pick(match, key) for key in ("sequences", "identical", "ties"))
    if sequences is None:
        return UNKNOWN, "sequences equal to plain decoding"
    others = sequences - (equal or 0) - (ties or 0)
    notes = [
        f"{ties} more equal up to a tie" if ties else "",
        f"{others} not equal" if others else "",
    ]
    return (
        f"{count(equal)}/{count(sequences)}",
        ", ".join(filter(None, notes)) or "sequences equal to plain decoding",
    )


def _vllm_note(vllm: Any) -> str:
    drafted, (matched, _) = (
        pick(vllm, "num_speculative_tokens"),
        identical(pick(vllm, "greedy_match")),
    )
    parts = [f"top-1 chain{f' of {drafted}' if drafted else ''}, no tree"]
    if pick(vllm, "expected_acceleration_rate") is not None:
        parts.append(f"{expected_rate(vllm)} expected")
    return "; ".join([*parts, *([] if matched == UNKNOWN else [f"greedy identical {matched}"])])
