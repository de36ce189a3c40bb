"""Tables of a report: heads, tree sizes, chain, drift, stages, quarantine and provenance.

An unknown cell is `-`. The table of a measurement that was not made has no rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.artifacts.tree_file import Expected
from pipeline.decoding.tree_search import fastest_choice
from pipeline.formatting import (
    count,
    duration,
    percent,
    quotient,
    rate,
    ratio,
    show,
    signed_percent,
    times,
)
from pipeline.report.facts import expected_rate, pairs
from pipeline.report.report import STAGES, Report, StageFigures, TrainFigures
from pipeline.report.text_table import NOT_RUN, Table

RANKS = ("top-1", "top-2", "top-3", "top-4", "top-5")
EXPECTED = ("expected rate", "step time", "expected speed")


def heads_table(report: Report) -> Table:
    """Build the report's table of the heads' accuracies; head k predicts the token at t+2+k."""
    table = Table("Heads", ["head", "predicts", *RANKS], words=(0, 1))
    table.note = "Share of held-out tokens that are among a head's first guesses."
    for k, head in enumerate(report.heads):
        shares = head.top1, head.top2, head.top3, head.top4, head.top5
        table.add(str(k), f"t+{k + 2}", *map(percent, shares))
    return table


def sizes_table(report: Report) -> Table:
    """Build the report's table of expected rate, and of step time and speed, by tree size."""
    table = Table("Tree sizes", ["nodes", *EXPECTED], empty="not measured", words=())
    tree = report.tree
    if tree:
        sizes = {size.nodes: size for size in tree.sizes or []}
        table.note = f"{count(tree.nodes)} nodes are used."
        if tree.dynamic:
            table.note += " The tree is dynamic: each step verifies its most probable nodes."
        _add_expected(table, sizes, tree.nodes, "nodes", report)
    return table


def chain_table(report: Report) -> Table:
    """Build the report's table of expected rate, step time and speed by vLLM's draft tokens."""
    table = Table("Chain", ["tokens", *EXPECTED], words=())
    tree = report.tree
    if tree:
        lengths = {length.draft_tokens: length for length in tree.chain}
        table.note = f"vLLM drafts {count(tree.num_speculative_tokens)} first guesses a step."
        _add_expected(table, lengths, tree.num_speculative_tokens, "draft_tokens", report)
    return table


def _fastest(sizes: Mapping[int, Expected]) -> int | None:
    """Return the size that `auto` chooses by expected rate and overhead; None without overheads."""
    rates = {}
    overheads = {}
    for size, expected in sizes.items():
        if expected.overhead is not None and expected.expected_acceleration_rate is not None:
            rates[size] = expected.expected_acceleration_rate
            overheads[size] = expected.overhead
    return fastest_choice(rates, overheads) if rates else None


def _add_expected(
    table: Table, rows: Mapping[int, Expected], used: int, setting: str, report: Report
) -> None:
    """Add expected rate, step time and speed of each size to a table of the report.

    `setting` chose the size that is used; the note says which one `auto` would use. Once the check
    has measured the overhead of the run's own tree, step time and speed are relative to the size
    that is used, so that the report has one overhead of a tree.
    """
    fastest = _fastest(rows)
    if fastest not in (None, used):
        table.note += f" On this machine, calibrate.{setting}: auto would use {count(fastest)}."
    own, unit = Expected(overhead=1.0, expected_speedup=1.0), "plain decoding"
    if report.native and used in rows and rows[used].overhead is not None:
        own, unit = rows[used], "the size in use"
    table.note += f" Step time and speed, timed natively at calibration, are relative to {unit}."
    for size, row in rows.items():
        step_time = quotient(row.overhead, own.overhead)
        speed = quotient(row.expected_speedup, own.expected_speedup)
        table.add(count(size), expected_rate(row), times(step_time), times(speed))


def drift_table(report: Report) -> Table:
    """Build the report's table of Medusa-2's drift from the original: KL, perplexity, agreement."""
    table = Table("Drift", ["", "value"])
    train = report.train
    if not train or not train.drift:
        return table
    table.note = "The tuned target against the original, at the tokens of held-out answers."
    drift = train.drift
    perplexity = drift.perplexity or {}
    table.add("KL to the original, nats per position", show(drift.kl, ".4f"))
    table.add("perplexity, original", show(perplexity.get("original"), ".3f"))
    table.add("perplexity, tuned", show(perplexity.get("tuned"), ".3f"))
    table.add("perplexity, change", signed_percent(drift.perplexity_change))
    table.add("same greedy token", percent(drift.greedy_agreement))
    table.add("positions", count(drift.positions))
    return table


def stages_table(report: Report) -> Table:
    """Build the report's table of stages: rows, quarantined rows, time and output."""
    columns = ["stage", "rows", "quarantined", "time", "made"]
    table = Table("Stages", columns, words=(0, 4))
    seconds = report.seconds_by_stage
    further = [name for name in seconds if name not in STAGES]
    figures = {
        "seeds": report.seeds,
        "generate": report.generate,
        "features": report.features,
        "train": report.train,
    }
    for name in (*further, *STAGES):
        if name not in seconds:
            table.add(name, NOT_RUN, NOT_RUN, NOT_RUN, (report.skipped or {}).get(name, ""))
            continue
        part = figures.get(name) or StageFigures()
        time = duration(seconds[name])
        table.add(name, count(part.rows), count(part.quarantined), time, _stage_output(part))
    return table


def _stage_output(part: StageFigures) -> str:
    """Describe a stage's output for one cell of the report's table of stages."""
    facts = []
    unit = "tokens"
    if isinstance(part, TrainFigures):
        unit = "positions"  # trained on, over all epochs
    if part.tool_rows:
        facts.append(f"{count(part.tool_rows)} rows call functions")
    if part.positions is not None:
        facts.append(f"{count(part.positions)} positions")
    if part.bytes_per_position is not None:
        facts.append(f"{rate(part.bytes_per_position)} bytes each")
    if part.tokens is not None:
        facts.append(f"{count(part.tokens)} {unit}")
    if part.tokens_per_second is not None:
        facts.append(f"{rate(part.tokens_per_second)} {unit}/s")
    if part.cut_at_tools is not None:
        facts.append(f"{count(part.cut_at_tools)} rows cut before functions")
    if part.unlearned_answers is not None:
        facts.append(f"{count(part.unlearned_answers)} answers marked not to learn")
    if isinstance(part, TrainFigures) and part.final_loss is not None:
        facts.append(f"loss {ratio(part.final_loss)}")
    return ", ".join(facts)


def quarantine_table(report: Report) -> Table:
    """Build the report's table of quarantined rows by stage and reason."""
    table = Table("Quarantine", ["stage", "reason", "rows"], words=(0, 1))
    if report.quarantine is None:
        return table
    table.empty = "nothing quarantined"
    for stage, reasons in report.quarantine.items():
        for reason, num_rows in reasons.items():
            if num_rows:
                table.add(stage, reason, count(num_rows))
    return table


def provenance_table(report: Report) -> Table:
    """Build the report's table of target, method, run, hardware, versions and fingerprints."""
    table = Table("Provenance", ["", ""], words=(0, 1))
    facts = {"target": report.target, "method": report.method, "heads": report.drafter}
    if report.run:
        facts["run"] = report.run.name
        facts["date"] = report.run.date
        facts["fingerprints"] = pairs(report.run.fingerprints)
    facts["hardware"] = pairs(report.hardware)
    facts["versions"] = pairs(report.versions)
    for name, text in facts.items():
        if text:
            table.add(name, text)
    return table
