"""The tables of what a run may have measured beside its verdict: categories of questions, drift, studies.

Each is there only where it has rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pipeline.report.facts import Table, pick
from pipeline.report.wording import count, percent, rate, ratio, show, signed_percent, times

Column = tuple[str, str, Callable[[Any], str]]  # its heading, the rows' key, how its values are said

_SPEED: tuple[Column, ...] = (
    ("acceleration rate", "acceleration_rate", ratio),
    ("overhead", "overhead", times),
    ("speedup", "speedup", times),
)
_BOTH_RATES: tuple[Column, ...] = (
    ("tokens/s, plain", "baseline_tokens_per_second", rate),
    ("tokens/s, Medusa", "tokens_per_second", rate),
    ("speedup", "speedup", times),
)
STUDIES: dict[str, tuple[str, str, tuple[Column, ...], int]] = {  # title, note, columns, how many of them are words
    "trees": (
        "Study: trees",
        "One ladder of trees on all the check's prompts, from plain decoding to the export's own.",
        (("tree", "tree", str), ("nodes", "nodes", count), *_SPEED),
        1,
    ),
    "typical": (
        "Study: typical acceptance",
        "delta is sqrt(eps); the speedup is over plain decoding at the same temperature, the log-likelihood in nats "
        "per token under the target at temperature 1.",
        (
            ("temperature", "temperature", lambda value: show(value, ".1f")),
            ("rule", "rule", str),
            ("eps", "eps", ratio),
            ("acceleration rate", "acceleration_rate", ratio),
            ("speedup", "speedup", times),
            ("log-likelihood", "log_likelihood", ratio),
        ),
        2,
    ),
    "heads": (
        "Study: heads used",
        "The export's tree, cut at each depth.",
        (("heads", "heads", count), ("nodes", "nodes", count), *_SPEED),
        1,
    ),
    "batch": (
        "Study: batch size",
        "The same prompts, decoded 1 to 16 at a time; prefill included.",
        (("sequences", "batch_size", count), *_BOTH_RATES),
        1,
    ),
}


def more_tables(report: dict) -> dict[str, Table]:
    """By name: `categories`, `drift`, and `study_…` of every study."""
    found = {"categories": categories_table(report), "drift": drift_table(report)}
    for name, (title, note, columns, num_words) in STUDIES.items():
        rows = pick(report, "check", "native", "studies", name) or []
        found[f"study_{name}"] = _table(title, note, columns, rows, num_words)
    return {name: table for name, table in found.items() if table.rows}


def categories_table(report: dict) -> Table:
    """Speed by category of question, as the field lists it; a single category is no more than the check itself."""
    columns: tuple[Column, ...] = (
        ("category", "category", str),
        ("prompts", "prompts", count),
        ("per step", "acceleration_rate", ratio),
        *_BOTH_RATES,
    )
    rows = pick(report, "check", "native", "categories") or []
    return _table(
        "Categories", "Tokens per forward of the target, and per second.", columns, rows if len(rows) > 1 else [], 1
    )


def drift_table(report: dict) -> Table:
    """How far Medusa-2 moved the target from the original, on held-out text that the original wrote."""
    drift = pick(report, "train", "drift") or {}
    facts = (
        ("KL to the original, nats per position", show(pick(drift, "kl"), ".4f")),
        ("perplexity, original", show(pick(drift, "perplexity", "original"), ".3f")),
        ("perplexity, tuned", show(pick(drift, "perplexity", "tuned"), ".3f")),
        ("perplexity, change", signed_percent(pick(drift, "perplexity_change"))),
        ("same greedy token", percent(pick(drift, "greedy_agreement"))),
        ("positions", count(pick(drift, "positions"))),
    )
    copy = f" in {bits}, in which it was trained" if (bits := pick(report, "train", "quantization")) else ""
    note = f"The tuned target against the original{copy}, at the target-written positions of held-out rows."
    return Table("Drift", ("", "value"), facts if drift else (), note)


def _table(title: str, note: str, columns: Iterable[Column], rows: list[dict], num_words: int) -> Table:
    columns = tuple(columns)
    cells = tuple(tuple(word(row.get(key)) for _, key, word in columns) for row in rows)
    return Table(title, tuple(heading for heading, *_ in columns), cells, note, words=tuple(range(num_words)))
