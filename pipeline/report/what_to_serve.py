"""The report's first table: what to serve in vLLM at each measured load."""

from __future__ import annotations

from pipeline.formatting import UNKNOWN, count, percent, rate, ratio
from pipeline.report.facts import greedy_matches
from pipeline.report.report import Report
from pipeline.report.text_table import Table

PLAIN, HEADS = "plain", "heads"


def what_to_serve_table(report: Report) -> Table:
    """Build the report's table of vLLM's methods by load, the fastest marked at each."""
    table = Table("What to serve", ["method in vLLM", "per step", "identical"])
    vllm = report.vllm
    if vllm is None:
        return table
    best = {choice.requests: choice.method for choice in vllm.choices or []}
    plain = [PLAIN, ratio(1.0), UNKNOWN]
    cells: dict[str, list[str]] = {PLAIN: plain}
    table.note = " ".join(vllm.advice or [])
    for method in vllm.methods or []:
        if method.failed:
            table.note += f" {method.name} failed: {method.failed}."
        rate_and_match = [ratio(method.acceleration_rate), greedy_matches(method.greedy_match)]
        cells[method.name] = [method.name, *rate_and_match]
    for row in report.studies.load or vllm.loads or []:
        fastest = best.get(row.requests)
        if row.method == HEADS:
            table.columns.append(f"tokens/s, {count(row.requests)} at a time")
            speed = _speed(row.baseline_tokens_per_second, row.baseline_within_slo)
            plain.append(_marked(speed, fastest == PLAIN))
        speed = _speed(row.tokens_per_second, row.within_slo)
        cells[row.method].append(_marked(speed, fastest == row.method))
    for name, row_cells in cells.items():
        if len(row_cells) > 3:
            table.add(*row_cells)
        elif report.studies.load:
            table.note += f" {name} is not measured under load."
    return table


def _marked(speed: str, is_best: bool) -> str:
    """Mark the speed of the fastest method."""
    return f"{speed} best" if is_best else speed


def _speed(tokens_per_second: float | None, within_slo: float | None) -> str:
    """Format a speed, with the share of requests within `check.slo` where there are limits."""
    speed = rate(tokens_per_second)
    return speed if within_slo is None else f"{speed} ({percent(within_slo)} in time)"
