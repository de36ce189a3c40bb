"""The tables of a report, as text that every form shows the same.

A table without rows stands for something that was not run. A cell that is not known is `-`.
"""

from __future__ import annotations

from typing import Any

from pipeline.report.decoding_methods import methods_table
from pipeline.report.facts import STAGES, Table, identical, pick
from pipeline.report.more_tables import more_tables
from pipeline.report.wording import NOT_RUN, UNKNOWN, count, duration, pairs, percent, rate, ratio, times


def tables(report: dict, extras: dict) -> dict[str, Table]:
    """All tables by name, in reading order: first what was found, last how it was made."""
    return {
        "check": check_table(report),
        "methods": methods_table(report),
        "heads": heads_table(report),
        "tree": tree_table(report, extras),
        "sizes": sizes_table(report),
        **more_tables(report),
        "stages": stages_table(report),
        "quarantine": quarantine_table(report),
        "provenance": provenance_table(report),
    }


def check_table(report: dict) -> Table:
    """One column per engine that the check ran; a row that no engine has is left out."""
    check = pick(report, "check") or {}
    engines = {name: part for name, part in check.items() if isinstance(part, dict)}
    facts: tuple[tuple[str, str, Any], ...] = (
        ("acceleration rate", "acceleration_rate", ratio),
        ("overhead", "overhead", times),
        ("speedup", "speedup", times),
        ("tokens/s", "tokens_per_second", rate),
        ("tokens/s, plain", "baseline_tokens_per_second", rate),
        ("time to first token", "time_to_first_token", duration),
        ("accepted per position", "accepted_per_position", _per_position),
        ("log-likelihood, nats per token", "log_likelihood", _by_name),
        ("prompts", "prompts", count),
        ("prompts skipped", "skipped_prompts", count),
    )
    rows = [(label, *(word(part.get(key)) for part in engines.values())) for label, key, word in facts]
    rows.insert(3, ("greedy identical", *(identical(part)[0] for part in engines.values())))
    rows.insert(4, ("greedy ties", *map(_ties, engines.values())))
    rows.insert(-3, ("acceptance", *map(_rule, engines.values())))
    known = tuple(row for row in rows if any(cell != UNKNOWN for cell in row[1:]))
    labels = {"native": "native", "vllm": "vLLM"}
    return Table("Check", ("", *(labels.get(name, name) for name in engines)), known)


def _ties(engine: dict) -> str:
    """How many sequences differ at a tie, and the target's top-2 gap under which it is one."""
    ties, tolerance = count(pick(engine, "greedy_match", "ties")), pick(engine, "tie_tolerance")
    return ties if tolerance is None else f"{ties}; a top-2 gap under {tolerance:g} is one"


def _rule(engine: dict) -> str:
    """The acceptance rule with its numbers, and how many sampled texts are those that plain sampling draws."""
    rule = engine.get("acceptance")
    numbers = [f"{name} {engine[name]:g}" for name in ("temperature", "eps", "delta", "top_p") if name in engine]
    first = [f"first token {engine['first_token']}"] if "first_token" in engine else []
    same = [f"as plain sampling {engine['sampled_identical']}"] if "sampled_identical" in engine else []
    return UNKNOWN if rule is None else ", ".join([rule, *numbers, *first, *same])


def _by_name(values: Any) -> str:
    return ", ".join(f"{name} {ratio(value)}" for name, value in values.items()) if values else UNKNOWN


def _per_position(values: Any) -> str:
    if not isinstance(values, list) or not values:
        return UNKNOWN
    shares = all(isinstance(value, (int, float)) and value <= 1 for value in values)
    return " ".join(percent(value) if shares else count(value) for value in values)


def heads_table(report: dict) -> Table:
    """Top-k accuracy of every head on held-out rows; head k predicts the token at t+2+k."""
    heads = pick(report, "heads") or []
    ranks = sorted({int(key[3:]) for head in heads for key in head if key[:3] == "top" and key[3:].isdecimal()})
    rows = tuple(
        (str(k), f"t+{k + 2}", *(percent(head.get(f"top{rank}")) for rank in ranks)) for k, head in enumerate(heads)
    )
    note = "Accuracy on held-out rows."
    return Table("Heads", ("head", "predicts", *(f"top-{rank}" for rank in ranks)), rows, note, words=(0, 1))


def tree_table(report: dict, extras: dict) -> Table:
    """The tree by depth: its nodes, and the tokens that each depth is expected to add to a step (section 2.3.3)."""
    choices = pick(extras, "tree", "choices") or []
    shares = pick(extras, "tree", "probabilities") or [None] * len(choices)
    nodes, expected = pick(report, "tree", "nodes"), pick(report, "tree", "expected_acceleration_rate")
    note = f"{count(nodes)} nodes, expected acceleration rate {ratio(expected)}." if pick(report, "tree") else ""
    if searches := pick(report, "tree", "searches"):
        note += " Judged on text that they had not seen, " + ", ".join(
            f"the {name} search reaches {ratio(found)}" for name, found in searches.items()
        )
        note += "."
    by_depth: dict[int, list[tuple[int, Any]]] = {}
    for path, share in zip(choices, shares, strict=True):
        by_depth.setdefault(len(path), []).append((path[-1], share))
    rows = []
    for depth, entries in sorted(by_depth.items()):
        known = [share for _, share in entries if share is not None]
        num_ranks = 1 + max(rank for rank, _ in entries)
        rows.append((str(depth), count(len(entries)), str(num_ranks), ratio(sum(known) if known else None)))
    if not rows and note:
        rows = [("all", count(nodes), UNKNOWN, UNKNOWN)]
    return Table("Tree", ("depth", "nodes", "ranks used", "expected tokens"), tuple(rows), note)


def sizes_table(report: dict) -> Table:
    """What trees of several sizes cost on the device, and what they promise there."""
    rows = tuple(
        (
            count(size.get("nodes")),
            times(size.get("overhead")),
            ratio(size.get("expected_acceleration_rate")),
            times(size.get("expected_speedup")),
        )
        for size in pick(report, "tree", "sizes") or []
    )
    columns = ("nodes", "overhead", "expected rate", "expected speedup")
    note = f"The {pick(report, 'tree', 'source')} search; {count(pick(report, 'tree', 'nodes'))} nodes are used, "
    note += "the fastest up to 5 %."
    return Table("Tree sizes", columns, rows, note if rows else "", "not measured", words=())


def stages_table(report: dict) -> Table:
    """Every stage with its rows, its quarantined rows, its time and what it made."""
    seconds = pick(report, "seconds_by_stage") or {}
    rows = []
    for name in _stages_in_order(seconds):
        part = pick(report, name)
        if name not in seconds and not part:
            rows.append((name, *[NOT_RUN] * 3, pick(report, "skipped", name) or ""))
            continue
        quarantined = quarantined_rows(report, name)
        num_rows = pick(part, "rows") if name != "check" else pick(part, "native", "prompts")
        rows.append((name, count(num_rows), count(quarantined), duration(seconds.get(name)), _made(report, name)))
    shares = _shares([seconds.get(row[0]) for row in rows])
    return Table("Stages", ("stage", "rows", "quarantined", "time", "made"), tuple(rows), words=(0, 4), shares=shares)


def _stages_in_order(seconds: dict) -> list[str]:
    """The stages that every run may have, and where they were run those that few have."""
    names, before = list(STAGES), None
    for name in seconds:
        if name not in names:
            names.insert(names.index(before) + 1 if before else 0, name)
        before = name
    return names


def quarantined_rows(report: dict, stage: str) -> int | None:
    """How many rows a stage refused; None where nothing says so."""
    reasons = pick(report, "quarantine", stage)
    stated = pick(report, stage, "quarantined")
    return sum(reasons.values()) if stated is None and reasons is not None else stated


def _made(report: dict, stage: str) -> str:
    def fact(key: str, word: Any, phrase: str) -> str:
        value = pick(report, "tree" if stage == "calibrate" else stage, *key.split("."))
        return "" if value is None else phrase.format(word(value))

    facts = {
        "generate": (("tokens", count, "{} tokens"), ("tokens_per_second", rate, "{} tokens/s per busy worker")),
        "features": (
            ("positions", count, "{} positions"),
            ("bytes_per_position", rate, "{} bytes each"),
            ("tokens_per_second", rate, "{} tokens/s per busy worker"),
        ),
        "train": (
            ("tokens", count, "{} tokens"),
            ("tokens_per_second", rate, "{} tokens/s"),
            ("final_loss", ratio, "loss {}"),
        ),
        "calibrate": (
            ("nodes", count, "{} nodes"),
            ("expected_acceleration_rate", ratio, "expects {} tokens per step"),
        ),
        "check": (("native.skipped_prompts", count, "{} prompts skipped"),),
    }
    return ", ".join(filter(None, (fact(*entry) for entry in facts.get(stage, ()))))


def quarantine_table(report: dict) -> Table:
    """Quarantined rows by stage and reason, most frequent first."""
    by_stage = pick(report, "quarantine") or {}
    entries = [(stage, reason, num) for stage, part in by_stage.items() for reason, num in (part or {}).items() if num]
    entries.sort(key=lambda entry: (-entry[2], entry[0], entry[1]))
    rows = tuple((stage, reason, count(num)) for stage, reason, num in entries)
    empty = NOT_RUN if pick(report, "quarantine") is None else "nothing quarantined"
    return Table(
        "Quarantine", ("stage", "reason", "rows"), rows, "", empty, (0, 1), _shares([num for _, _, num in entries])
    )


def provenance_table(report: dict) -> Table:
    """What the figures were measured on and with."""
    facts = [
        ("target", pick(report, "target")),
        ("method", pick(report, "method")),
        ("heads", pick(report, "num_heads")),
        ("run", pick(report, "run", "name")),
        ("date", pick(report, "run", "date")),
        ("hardware", pairs(pick(report, "hardware"))),
        ("versions", pairs(pick(report, "versions"))),
        ("fingerprints", pairs(pick(report, "run", "fingerprints"))),
    ]
    rows = tuple((name, str(value)) for name, value in facts if value not in (None, ""))
    return Table("Provenance", ("", ""), rows, words=(0, 1))


def _shares(values: list[Any]) -> tuple[float, ...]:
    largest = max((value for value in values if value), default=1)
    return tuple((value or 0) / largest for value in values)
