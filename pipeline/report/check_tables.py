"""The tables of the check: one column per engine, one row per decoding method, categories and
studies.

A cell that is not known is `-`; a table without rows was not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.formatting import (
    UNKNOWN,
    count,
    duration,
    pairs,
    percent,
    rate,
    ratio,
    show,
    times,
)
from pipeline.report.facts import (
    Table,
    expected_rate,
    has_seen_answers,
    identical,
    measured_rate,
    on_new_answers,
    pick,
)

RATES = (
    "Acceleration rates are tokens kept over forwards of the target, without the prefill and its"
    " token, in either engine. Accepted per position: the share of vLLM's steps that keep at least"
    " 1, 2, … drafted tokens."
)
NOTE = (
    "Tokens per forward of the target and per second, time to the first token and per further one."
    " Speedups are over plain decoding with the same engine; generate, prompt lookup and assistant"
    " are transformers' own; vLLM decodes all prompts at once, and with the heads' top-1 chain, not"
    " the tree"
)

Column = tuple[str, str, Callable[[Any], str]]  # heading, key, format


def _identical(match: Any) -> str:
    return identical(match)[0]


_SPEED: tuple[Column, ...] = (
    ("acceleration rate", "acceleration_rate", ratio),
    ("overhead", "overhead", times),
    ("speedup", "speedup", times),
)


def _percentiles(times: Any) -> str:
    return (
        " / ".join(show(times.get(name), ".3g") for name in ("p50", "p90", "p99"))
        if times
        else UNKNOWN
    )


_BOTH_RATES: tuple[Column, ...] = (
    ("tokens/s, plain", "baseline_tokens_per_second", rate),
    ("tokens/s, with heads", "tokens_per_second", rate),
    ("speedup", "speedup", times),
)
_METHODS: tuple[Column, ...] = (
    ("method", "name", str),
    ("per step", "acceleration_rate", ratio),
    ("tokens/s", "tokens_per_second", rate),
    ("speedup", "speedup", times),
    ("to first", "time_to_first_token", duration),
    ("per token", "time_per_output_token", duration),
    ("identical", "greedy_match", _identical),
)
STUDIES: dict[
    str, tuple[str, str, tuple[Column, ...], int]
] = {  # title, note, columns, number of text columns
    "trees": (
        "Study: trees",
        (
            "One ladder of trees on all the check's prompts, from plain decoding to the"
            " export's own."
        ),
        (("tree", "tree", str), ("nodes", "nodes", count), *_SPEED),
        1,
    ),
    "typical": (
        "Study: typical acceptance",
        (
            "delta is sqrt(eps); the speedup is over plain decoding at the same temperature,"
            " the log-likelihood in nats per token under the target at temperature 1."
        ),
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
    "load": (
        "Study: load",
        (
            "vLLM as a server, with so many requests at once; time to the first token and per"
            " further one in ms, p50 / p90 / p99 of the requests. Client and server share the"
            " machine. Per step: the answers' tokens without the first of each, over the drafts"
            " that the server counts; the check counts the forwards of each request instead."
        ),
        (
            ("requests", "requests", count),
            ("per step", "acceleration_rate", ratio),
            *_BOTH_RATES,
            ("to first, plain", "baseline_ttft_ms", _percentiles),
            ("to first, with heads", "ttft_ms", _percentiles),
            ("per token, plain", "baseline_tpot_ms", _percentiles),
            ("per token, with heads", "tpot_ms", _percentiles),
            ("within limits, plain", "baseline_within_slo", percent),
            ("within limits, with heads", "within_slo", percent),
        ),
        1,
    ),
}


def study_tables(report: dict) -> dict[str, Table]:
    """`study_…` for each study that was run."""
    engines = [pick(report, "check", name) or {} for name in ("native", "vllm")]
    studies = {
        name: rows for engine in engines for name, rows in (pick(engine, "studies") or {}).items()
    }
    in_words = {"load": pick(engines[1], "under_load")}
    found = {}
    for name, (title, note, columns, num_words) in STUDIES.items():
        if rows := studies.get(name):
            shown = tuple(
                column for column in columns if column[1] in rows[0]
            )  # limits may not be set
            note = " ".join(filter(None, (note, in_words.get(name))))
            found[f"study_{name}"] = filled(title, note, shown, rows, words=tuple(range(num_words)))
    return found


def check_table(report: dict) -> Table:
    """One column per engine; rows that no engine has are left out."""
    check = pick(report, "check") or {}
    engines = {name: part for name, part in check.items() if isinstance(part, dict)}
    promises = [
        pick(report, "tree") if name == "native" else part for name, part in engines.items()
    ]
    facts: tuple[tuple[str, str, Any], ...] = (
        ("the same chain on the same text, natively", "same_text_acceleration_rate", ratio),
        ("overhead", "overhead", times),
        ("speedup", "speedup", times),
        ("greedy identical", "greedy_match", _identical),
        ("tokens/s", "tokens_per_second", rate),
        ("tokens/s, plain", "baseline_tokens_per_second", rate),
        ("time to first token", "time_to_first_token", duration),
        ("accepted per position", "accepted_per_position", _per_position),
        ("log-likelihood, nats per token", "log_likelihood", _by_name),
        ("vLLM's model runner", "model_runners", _runners),
        ("vLLM is started with", "export_alone", _started),
        ("prompts", "prompts", count),
        ("prompts skipped", "skipped_prompts", count),
    )
    rows = [
        ("acceleration rate", *map(measured_rate, engines.values())),
        ("expected", *map(expected_rate, promises)),
    ]
    if has_seen_answers(report):
        new_promises = [pick(promise, "new") for promise in promises]
        rows += [
            (
                "answers seen in training",
                *(percent(part.get("seen_share")) for part in engines.values()),
            ),
            ("acceleration rate on new answers", *map(on_new_answers, engines.values())),
            ("expected on new answers", *map(expected_rate, new_promises)),
        ]
    for label, key, word in facts:
        rows.append((label, *(word(part.get(key)) for part in engines.values())))
        if key == "greedy_match":
            rows.append(("greedy ties", *map(_ties, engines.values())))
        if key == "export_alone":
            rows.append(("acceptance", *map(_rule, engines.values())))
    known = tuple(row for row in rows if any(cell != UNKNOWN for cell in row[1:]))
    labels = {"native": "native", "vllm": "vLLM"}
    note = RATES if "vllm" in engines else ""
    return Table("Check", ("", *(labels.get(name, name) for name in engines)), known, note)


def served_model_table(report: dict) -> Table:
    """The heads on the copy that will be served beside those on their target; one row per
    engine.
    """
    copy = pick(report, "served_model") or {}
    labels = {"native": "native", "vllm": "vLLM"}
    rows = []
    for name in (name for name in labels if name in copy):
        found, on_target = copy[name], pick(report, "check", name)
        rates = [measured_rate(each) for each in (on_target, found)]
        rest = (
            times(pick(found, "speedup")),
            rate(pick(found, "tokens_per_second")),
            _identical(found["greedy_match"]),
        )
        rows.append((labels[name], *rates, *rest))
    note = (
        f"{copy.get('model')}, {copy.get('format')}; its greedy text against itself alone."
        if rows
        else ""
    )
    columns = (
        "",
        "rate on the target",
        "rate on the copy",
        "speedup",
        "tokens/s",
        "greedy identical",
    )
    return Table("Served model", columns, tuple(rows), note)


def _runners(by_side: Any) -> str:
    """Both sides' where they differ: then a part of a difference in speed, or in rounding, is the
    runners'.
    """
    runners = set((by_side or {}).values())
    return runners.pop() if len(runners) == 1 else pairs(by_side) or UNKNOWN


def _started(export_alone: bool | None) -> str:
    return {True: "the export alone", False: "target and export"}.get(export_alone, UNKNOWN)  # type: ignore[arg-type]


def _ties(engine: dict) -> str:
    """How many sequences first differ at a tie, and the top-2 gap that defines one."""
    ties, tolerance = count(pick(engine, "greedy_match", "ties")), pick(engine, "tie_tolerance")
    return ties if tolerance is None else f"{ties}; a top-2 gap under {tolerance:g} is one"


def _rule(engine: dict) -> str:
    """The acceptance rule with its parameters, and how many sampled texts equal those of plain
    sampling.
    """
    rule = engine.get("acceptance")
    numbers = [
        f"{name} {engine[name]:g}"
        for name in ("temperature", "eps", "delta", "top_p")
        if name in engine
    ]
    first = [f"first token {engine['first_token']}"] if "first_token" in engine else []
    same = (
        [f"as plain sampling {engine['sampled_identical']}"]
        if "sampled_identical" in engine
        else []
    )
    return UNKNOWN if rule is None else ", ".join([rule, *numbers, *first, *same])


def _by_name(values: Any) -> str:
    return (
        ", ".join(f"{name} {ratio(value)}" for name, value in values.items()) if values else UNKNOWN
    )


def _per_position(values: Any) -> str:
    if not isinstance(values, list) or not values:
        return UNKNOWN
    shares = all(isinstance(value, (int, float)) and value <= 1 for value in values)
    return " ".join(percent(value) if shares else count(value) for value in values)


def methods_table(report: dict) -> Table:
    """One row per decoding method: tokens per forward and per second, and latencies."""
    native, vllm = pick(report, "check", "native"), pick(report, "check", "vllm")
    rows, failed = _both_sides(native, ""), []
    for other in pick(native, "baselines") or []:
        name = str(other.get("name")).replace("-", " ")
        if reason := other.get("failed"):
            failed.append(f"{name} failed: {reason}")
            other = {"acceleration_rate": "failed"}
        rows.append(other | {"name": name})
    rows += _both_sides(vllm, "vLLM ")
    repeats = pick(native, "repeats") or 1
    medians = [f"Times are medians of {count(repeats)} repetitions"] if repeats > 1 else []
    threads = pick(native, "threads")
    if threads:
        medians.append(f"Native steps are timed on {threads} CPU thread{'s' * (threads != 1)}")
    return filled("Methods", ". ".join([NOTE, *medians, *failed]).rstrip(".") + ".", _METHODS, rows)


def _both_sides(engine: dict | None, prefix: str) -> list[dict[str, Any]]:
    """An engine's figures of plain decoding and with heads; none where it was not run."""
    if not engine:
        return []
    plain = {
        key.removeprefix("baseline_"): value
        for key, value in engine.items()
        if key.startswith("baseline_")
    }
    plain = {"acceleration_rate": 1.0, "speedup": 1.0} | plain | {"name": f"{prefix}plain"}
    return [plain, engine | {"name": f"{prefix}with heads"}]


def categories_table(report: dict) -> Table:
    """Speed by category of question; empty for a single category, which would repeat the check."""
    columns: tuple[Column, ...] = (
        ("category", "category", str),
        ("prompts", "prompts", count),
        ("per step", "acceleration_rate", ratio),
        *_BOTH_RATES,
    )
    rows = pick(report, "check", "native", "categories") or []
    names = dict.fromkeys(name for row in rows for name in row.get("baselines") or {})
    beside: tuple[Column, ...] = tuple((name.replace("-", " "), name, str) for name in names)
    rows = [row | {name: _beside(pick(row, "baselines", name)) for name in names} for row in rows]
    note = (
        "Tokens per forward of the target, and per second; of transformers' baselines the rate and"
        " the speedup."
    )
    return filled("Categories", note, (*columns, *beside), rows if len(rows) > 1 else [])


def _beside(figures: Any) -> str:
    return f"{ratio(pick(figures, 'acceleration_rate'))}, {times(pick(figures, 'speedup'))}"


def exact_match_table(report: dict) -> Table:
    """The share of answers that are their reference, by category of question; empty without
    references.
    """
    rows = pick(report, "check", "exact_match") or []
    methods = dict.fromkeys(
        key for row in rows for key in row if key not in ("category", "answers")
    )
    columns: tuple[Column, ...] = (
        ("category", "category", str),
        ("answers", "answers", count),
        *((method, method, percent) for method in methods),
    )
    note = (
        "Answers that are their reference, but for case, punctuation and articles; of a number the"
        " last one counts."
    )
    return filled("Exact match", note, columns, rows)


def filled(
    title: str, note: str, columns: tuple[Column, ...], rows: list[dict], **settings: Any
) -> Table:
    """A table with a row for each dictionary; `settings` are further fields of `Table`."""
    cells = tuple(tuple(word(row.get(key)) for _, key, word in columns) for row in rows)
    return Table(title, tuple(heading for heading, *_ in columns), cells, note, **settings)
