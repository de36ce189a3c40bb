"""The report's first table: what to serve in vLLM, and each method's speed at each load."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.artifacts.check_result import (
    HEADS,
    PLAIN,
    ServingAdvice,
    ServingChoice,
    VllmFigures,
)
from pipeline.formatting import UNKNOWN, count, percent, rate, ratio
from pipeline.report.facts import greedy_matches
from pipeline.report.report import Report
from pipeline.report.text_table import Table


def what_to_serve_table(report: Report) -> Table:
    """Build the report's table of vLLM's methods by load, the fastest marked unless there is a tie.

    Commands are of the report's run; a report without one has none.
    """
    table = Table("What to serve", ["method in vLLM", "per step", "identical"])
    vllm = report.vllm
    if vllm is None:
        return table
    choices = {choice.requests: choice for choice in vllm.choices or []}
    advice = vllm.advice or []
    table.points = [each.text for each in advice]
    table.note = " ".join(_remarks(report, vllm))
    if report.run:
        table.commands = commands(advice)
    plain = [PLAIN, ratio(1.0), UNKNOWN]
    margins = ["margin over the next", "", ""]
    cells: dict[str, list[str]] = {PLAIN: plain}
    for method in vllm.methods or []:
        cells[method.name] = [
            method.name,
            ratio(method.acceleration_rate),
            greedy_matches(method.greedy_match),
        ]
    for row in report.studies.load or vllm.loads or []:
        choice = choices.get(row.requests)
        best = choice.method if choice and choice.is_beyond_scatter else None
        if row.method == HEADS:
            table.columns.append(f"tokens/s, {count(row.requests)} at once")
            margins.append(_margin(choice))
            plain.append(
                _speed(row.baseline_tokens_per_second, row.baseline_within_slo, best == PLAIN)
            )
        cells[row.method].append(_speed(row.tokens_per_second, row.within_slo, best == row.method))
    for row_cells in cells.values():
        if len(row_cells) > 3:
            table.add(*row_cells)
    if table.rows:
        table.add(*margins)
    return table


def _remarks(report: Report, vllm: VllmFigures) -> list[str]:
    """Return the sentences of the table's note: what the columns mean, and what is missing."""
    measured = "of vLLM's server" if report.studies.load else "of vLLM without a server"
    remarks = [
        f"Tokens/s are those {measured} with so many requests at once, on the check's prompts,"
        " and depend on the text. Per step: tokens kept per forward of the target."
        " Identical: greedy answers equal to plain vLLM's. Tie: neither of the two fastest is"
        " the faster one in every repeat. Native speeds, and waiting times in the study of load,"
        " are in the tables below. check.draft_tokens adds rows of heads with other numbers of"
        " drafts per step, and check.slo limits waiting times."
    ]
    if report.run and vllm.advice:
        remarks.append("RUN_DIR is this run's directory.")
    for method in vllm.methods or []:
        if method.failed:
            remarks.append(f"{method.name} failed: {method.failed}.")
    for name, reason in (vllm.failed_loads or {}).items():
        remarks.append(f"{name} failed under load: {reason}.")
    return remarks


def commands(advice: Sequence[ServingAdvice]) -> list[str]:
    """Return each command once, with the loads that it is for as a comment."""
    loads: dict[str, list[str]] = {}
    for each in advice:
        loads.setdefault(each.command, []).append(each.loads)
    return [
        f"{command}  # {'; '.join(of_command).lower()}" for command, of_command in loads.items()
    ]


def _margin(choice: ServingChoice | None) -> str:
    """Format by how much the fastest method is faster than the next, or that the two tie."""
    if choice is None:
        return "not judged"
    if choice.margin is None:
        return UNKNOWN
    if not choice.is_beyond_scatter:
        return f"tie with {choice.second}"
    return f"{percent(choice.margin)} over {choice.second}"


def _speed(tokens_per_second: float | None, within_slo: float | None, is_best: bool) -> str:
    """Format a speed, with the share of requests within `check.slo`, and mark the fastest."""
    speed = rate(tokens_per_second)
    if within_slo is not None:
        speed += f" ({percent(within_slo)} in time)"
    return f"{speed} (fastest)" if is_best else speed
