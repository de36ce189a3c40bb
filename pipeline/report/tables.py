"""All tables of a report, the same in every form, and those of the run: heads, tree, stages,
quarantine, provenance.

A table without rows stands for something that was not run. A cell that is not known is `-`.
"""

from __future__ import annotations

from typing import Any

from pipeline.formatting import (
    NOT_RUN,
    UNKNOWN,
    count,
    duration,
    pairs,
    percent,
    rate,
    ratio,
    show,
    signed_percent,
    times,
)
from pipeline.report.check_tables import (
    Column,
    categories_table,
    check_table,
    exact_match_table,
    filled,
    methods_table,
    served_model_table,
    study_tables,
)
from pipeline.report.facts import STAGES, Table, expected_rate, pick

_PROMISED: tuple[Column, ...] = (
    ("overhead", "overhead", times),
    ("expected rate", "rate", str),
    ("expected speedup", "expected_speedup", times),
)


def tables(report: dict, extras: dict) -> dict[str, Table]:
    """All tables by name, in reading order: results first, then how they were made."""
    optional = {
        "categories": categories_table(report),
        "exact_match": exact_match_table(report),
        "served_model": served_model_table(report),
        "drift": drift_table(report),
        "skipped": skipped_files_table(report),
    }
    return {
        "check": check_table(report),
        "methods": methods_table(report),
        "heads": heads_table(report),
        "tree": tree_table(report, extras),
        "sizes": sizes_table(report),
        "chain": chain_table(report),
        **{name: table for name, table in optional.items() if table.rows},
        **study_tables(report),
        "stages": stages_table(report),
        "quarantine": quarantine_table(report),
        "provenance": provenance_table(report),
    }


def heads_table(report: dict) -> Table:
    """Top-k accuracy of every head on held-out rows; head k predicts the token at t+2+k."""
    heads = pick(report, "heads") or []
    ranks = sorted(
        {int(key[3:]) for head in heads for key in head if key[:3] == "top" and key[3:].isdecimal()}
    )
    columns = ["head", "predicts", *(f"top-{rank}" for rank in ranks)]
    on_new = bool(pick(report, "tree", "seen_share"))
    if on_new:
        columns += ["top-1, new answers", "top-5, new answers"]
    rows = []
    for k, head in enumerate(heads):
        row = [str(k), f"t+{k + 2}", *(percent(head.get(f"top{rank}")) for rank in ranks)]
        if on_new:
            row += [percent(pick(head, "new", "top1")), percent(pick(head, "new", "top5"))]
        rows.append(tuple(row))
    note = f"Accuracy on {pick(report, 'tree', 'text') or 'held-out rows'}."
    if on_new:
        seen = percent(pick(report, "tree", "seen_share"))
        note += (
            f" {seen} of the answers are in the training text as well; the new ones stand apart."
        )
    return Table("Heads", tuple(columns), tuple(rows), note, words=(0, 1))


def tree_table(report: dict, extras: dict) -> Table:
    """The tree by depth: its nodes, and the tokens that each depth adds to a step; they sum to the
    expected rate.
    """
    if pick(report, "tree", "dynamic"):
        return _dynamic_tree_table(report)
    choices = pick(extras, "tree", "choices") or []
    shares = pick(extras, "tree", "node_shares") or [None] * len(choices)
    nodes, expected = pick(report, "tree", "nodes"), expected_rate(pick(report, "tree"))
    note = (
        f"{count(nodes)} nodes, expected acceleration rate {expected}."
        if pick(report, "tree")
        else ""
    )
    if searches := pick(report, "tree", "searches"):
        note += " On text not used for the search, " + ", ".join(
            f"the {name} search reaches {ratio(found)}" for name, found in searches.items()
        )
        note += "."
    by_depth: dict[int, list[tuple[int, Any]]] = {}
    for path, share in zip(choices, shares, strict=True):
        by_depth.setdefault(len(path), []).append((path[-1], share))
    rows = [("0", "the target's own token", UNKNOWN, ratio(1.0))] if by_depth else []
    for depth, entries in sorted(by_depth.items()):
        known = [share for _, share in entries if share is not None]
        num_ranks = 1 + max(rank for rank, _ in entries)
        rows.append(
            (str(depth), count(len(entries)), str(num_ranks), ratio(sum(known) if known else None))
        )
    if not rows and note:
        rows = [("all", count(nodes), UNKNOWN, UNKNOWN)]
    return Table("Tree", ("depth", "nodes", "ranks used", "tokens per step"), tuple(rows), note)


def _dynamic_tree_table(report: dict) -> Table:
    """A dynamic tree has other nodes in every step, so only what each depth adds is known."""
    nodes, source = count(pick(report, "tree", "nodes")), pick(report, "tree", "source")
    static = ratio(pick(report, "tree", "searches", source))
    note = (
        f"Native decoding grows a dynamic tree: in every step the {nodes} nodes that the heads hold"
        f" most probable, expected acceleration rate {expected_rate(pick(report, 'tree'))}. A"
        f" static tree of the same size, by the {source} search, reaches {static} on text not used"
        " for the search; it is in the export for engines that read paths."
    )
    added = [1.0, *(pick(report, "tree", "tokens_by_depth") or [])]
    what = ["the target's own token", *[UNKNOWN] * (len(added) - 1)]
    rows = [(str(depth), what[depth], UNKNOWN, ratio(tokens)) for depth, tokens in enumerate(added)]
    return Table("Tree", ("depth", "nodes", "ranks used", "tokens per step"), tuple(rows), note)


def sizes_table(report: dict) -> Table:
    """The cost and the expected speedup of trees of several sizes on the device."""
    source, nodes = pick(report, "tree", "source"), count(pick(report, "tree", "nodes"))
    which = "Dynamic trees" if pick(report, "tree", "dynamic") else f"The {source} search"
    note = f"{which}; {nodes} nodes are used, the fastest up to 5 %."
    rows = [row | {"rate": expected_rate(row)} for row in pick(report, "tree", "sizes") or []]
    return filled(
        "Tree sizes",
        note,
        (("nodes", "nodes", count), *_PROMISED),
        rows,
        empty="not measured",
        words=(),
    )


def chain_table(report: dict) -> Table:
    """The chain that vLLM drafts, by its number of tokens."""
    drafted = count(pick(report, "tree", "num_speculative_tokens"))
    rows = [row | {"rate": expected_rate(row)} for row in pick(report, "tree", "chain") or []]
    timed = any(row.get("overhead") for row in rows)
    rates = {
        row["draft_tokens"]: row.get("expected_acceleration_rate") or 0
        for row in rows
        if row.get("draft_tokens")
    }
    note = f"What vLLM drafts: first guesses alone. {drafted} tokens are drafted"
    if timed:
        accepts_most = max(rates, key=lambda number: rates[number])
        note += (
            f", the fastest up to 5 % by native overheads; {count(accepts_most)} would accept most"
        )
    note += "."
    columns = _PROMISED if timed else tuple(column for column in _PROMISED if column[1] == "rate")
    return filled("Chain", note, (("tokens", "draft_tokens", count), *columns), rows, words=())


def drift_table(report: dict) -> Table:
    """How far Medusa-2 moved the target from the original, on held-out text that the original
    wrote.
    """
    drift = pick(report, "train", "drift") or {}
    facts = (
        ("KL to the original, nats per position", show(pick(drift, "kl"), ".4f")),
        ("perplexity, original", show(pick(drift, "perplexity", "original"), ".3f")),
        ("perplexity, tuned", show(pick(drift, "perplexity", "tuned"), ".3f")),
        ("perplexity, change", signed_percent(pick(drift, "perplexity_change"))),
        ("same greedy token", percent(pick(drift, "greedy_agreement"))),
        ("positions", count(pick(drift, "positions"))),
    )
    copy = (
        f" in {bits}, in which it was trained"
        if (bits := pick(report, "train", "quantization"))
        else ""
    )
    sides = f"The tuned target against the original{copy}"
    if pick(report, "train", "adapter_drift"):
        sides = "The published weights against the original"
    note = f"{sides}, at the target-written positions of held-out rows."
    return Table("Drift", ("", "value"), facts if drift else (), note)


def stages_table(report: dict) -> Table:
    """Each stage with its rows, quarantined rows, time and output."""
    seconds = pick(report, "seconds_by_stage") or {}
    rows = []
    for name in _stages_in_order(seconds):
        part = pick(report, name)
        if name not in seconds and not part:
            rows.append((name, *[NOT_RUN] * 3, pick(report, "skipped", name) or ""))
            continue
        quarantined = pick(part, "quarantined")
        if quarantined is None and (reasons := pick(report, "quarantine", name)) is not None:
            quarantined = sum(reasons.values())
        num_rows = pick(part, "rows") if name != "check" else pick(part, "native", "prompts")
        rows.append(
            (
                name,
                count(num_rows),
                count(quarantined),
                duration(seconds.get(name)),
                _made(report, name),
            )
        )
    shares = _shares([seconds.get(row[0]) for row in rows])
    return Table(
        "Stages",
        ("stage", "rows", "quarantined", "time", "made"),
        tuple(rows),
        words=(0, 4),
        shares=shares,
    )


def _stages_in_order(seconds: dict) -> list[str]:
    """The usual stages in order, with further ones where they were run."""
    names, before = list(STAGES), None
    for name in seconds:
        if name not in names:
            names.insert(names.index(before) + 1 if before else 0, name)
        before = name
    return names


def _made(report: dict, stage: str) -> str:
    def fact(key: str, word: Any, phrase: str) -> str:
        value = pick(report, "tree" if stage == "calibrate" else stage, *key.split("."))
        return "" if value is None else phrase.format(word(value))

    facts = {
        "seeds": (("tool_rows", count, "{} rows call functions"),),
        "generate": (
            ("tokens", count, "{} tokens"),
            ("tokens_per_second", rate, "{} tokens/s per busy worker"),
            ("special_token_rows", count, "{} rows with special tokens in the seed's text"),
            ("cut_at_tools", count, "{} rows cut before functions that the template cannot render"),
        ),
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
            (
                "expected_acceleration_rate",
                lambda _: expected_rate(pick(report, "tree")),
                "expects {} tokens per step",
            ),
        ),
        "check": (("native.skipped_prompts", count, "{} prompts skipped"),),
    }
    return ", ".join(filter(None, (fact(*entry) for entry in facts.get(stage, ()))))


def quarantine_table(report: dict) -> Table:
    """Quarantined rows by stage and reason, most frequent first."""
    by_stage = pick(report, "quarantine") or {}
    entries = [
        (stage, reason, num)
        for stage, part in by_stage.items()
        for reason, num in (part or {}).items()
        if num
    ]
    entries.sort(key=lambda entry: (-entry[2], entry[0], entry[1]))
    rows = tuple((stage, reason, count(num)) for stage, reason, num in entries)
    empty = NOT_RUN if pick(report, "quarantine") is None else "nothing quarantined"
    return Table(
        "Quarantine",
        ("stage", "reason", "rows"),
        rows,
        "",
        empty,
        (0, 1),
        _shares([num for _, _, num in entries]),
    )


def skipped_files_table(report: dict) -> Table:
    """The files of the seeds' directories that were not read, and why."""
    sources = pick(report, "seeds", "sources") or []
    rows = tuple((file["name"], file["why"]) for source in sources for file in source["skipped"])
    read = sum(len(source["read"]) for source in sources)
    return Table(
        "Skipped files",
        ("file", "why"),
        rows,
        f"{count(read)} files of seeds were read.",
        words=(0, 1),
    )


def provenance_table(report: dict) -> Table:
    """The hardware, versions and inputs of the figures."""
    places = {
        "target": ("target",),
        "method": ("method",),
        "heads": ("drafter",),
        "run": ("run", "name"),
        "date": ("run", "date"),
        "hardware": ("hardware",),
        "versions": ("versions",),
        "fingerprints": ("run", "fingerprints"),
    }
    rows = tuple(
        (name, text) for name, place in places.items() if (text := pairs(pick(report, *place)))
    )
    return Table("Provenance", ("", ""), rows, words=(0, 1))


def _shares(values: list[Any]) -> tuple[float, ...]:
    largest = max((value for value in values if value), default=1)
    return tuple((value or 0) / largest for value in values)
