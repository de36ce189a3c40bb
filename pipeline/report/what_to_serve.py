"""What to serve in vLLM: one recommendation for each number of requests at once.

A method whose greedy text is not the target's is never chosen. Of methods within each other's
repeats the simplest is chosen: plain decoding before drafts without heads, and these before heads.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.artifacts.check_result import HEADS, PLAIN, LoadRow, ServedMethod, VllmFigures
from pipeline.formatting import UNKNOWN, count, ratio
from pipeline.report.facts import greedy_matches, rough_note
from pipeline.report.report import Report
from pipeline.report.speeds import Repeats, speed_cell
from pipeline.report.text_table import Table

SERVE = "medusa-distill serve RUN_DIR"


@dataclass(frozen=True)
class Advice:
    """What to serve with `requests` at once, in words, and the command that serves it."""

    requests: int
    text: str
    method: str
    command: str

    @property
    def line(self) -> str:
        """The advice as a line of the report."""
        return f"{at_a_time(self.requests)}: {self.text}"


def at_a_time(requests: int) -> str:
    """Name a load: `1 request at a time`, `8 at a time`."""
    return "1 request at a time" if requests == 1 else f"{count(requests)} at a time"


def load_rows(report: Report) -> list[LoadRow]:
    """Return the rows of all methods at all loads: the load study's, or else the check's."""
    found = report.studies.load
    if found is None and report.vllm is not None:
        found = report.vllm.loads
    return found or []


def serving_advice(report: Report) -> list[Advice]:
    """Return what to serve at each measured load, from few requests to many."""
    if report.vllm is None:
        return []
    by_load: dict[int, list[LoadRow]] = {}
    for row in load_rows(report):
        by_load.setdefault(row.requests, []).append(row)
    methods = {method.name: method for method in report.vllm.methods or []}
    return [_advice(requests, by_load[requests], methods) for requests in sorted(by_load)]


def _advice(requests: int, rows: Sequence[LoadRow], methods: dict[str, ServedMethod]) -> Advice:
    """Return what to serve at one load, from the rows of all methods."""
    first = rows[0]
    plain = Repeats.of(PLAIN, first.baseline_tokens_per_second, first.baseline_range)
    measured = [plain]
    for row in rows:
        method = methods[row.method]
        match = method.greedy_match
        if not method.failed and (match is None or not match.differing):
            measured.append(Repeats.of(row.method, row.tokens_per_second, row.range))
    measured.sort(key=lambda each: -each.speed)
    fastest = measured[0]
    served = min(
        (each for each in measured if each.overlaps(fastest)),
        key=lambda each: _complexity(each.method),
    )
    if served is plain:
        text = "plain vLLM"
    else:
        text = f"{served.method}, {served.over(plain)} plain ({served.range_over(plain)})"
    for other in measured:
        if other is not served and other.overlaps(served):
            figures = f"{other.over(served)}, {other.range_over(served)}"
            text += f"; within its repeats: {other.method} ({figures})"
            break
    return Advice(requests, f"{text}.", served.method, _command(methods.get(served.method)))


def _complexity(method: str) -> int:
    """Rank methods: plain decoding, drafts without heads, heads."""
    if method == PLAIN:
        return 0
    return 2 if method.startswith(HEADS) else 1


def _command(method: ServedMethod | None) -> str:
    """Return the command that serves a method; None is plain decoding."""
    if method is None:
        return f"{SERVE} --plain"
    config = method.speculative_config or {}
    if method.name == HEADS:
        return SERVE
    if method.name.startswith(HEADS):
        return f"{SERVE} --draft-tokens {config['num_speculative_tokens']}"
    return f"{SERVE} --plain -- --speculative-config {shlex.quote(json.dumps(config))}"


def what_to_serve_table(report: Report) -> Table:
    """Build the report's table of the speed of vLLM's methods by load, with what to serve.

    Commands are of the report's run; a report without one has none.
    """
    table = Table("What to serve", ["method in vLLM", "per step", "identical"])
    vllm = report.vllm
    if vllm is None:
        return table
    advice = serving_advice(report)
    table.points = [each.line for each in advice]
    rough = rough_note(vllm)
    if rough:
        table.points.insert(0, rough)
    table.note = " ".join(_remarks(report, vllm))
    if report.run:
        table.commands = _commands(advice)
    plain = [PLAIN, ratio(1.0), UNKNOWN]
    cells: dict[str, list[str]] = {PLAIN: plain}
    for method in vllm.methods or []:
        per_step, identical = ratio(method.acceleration_rate), greedy_matches(method.greedy_match)
        cells[method.name] = [method.name, per_step, identical]
    for row in load_rows(report):
        if row.method == HEADS:
            table.columns.append(f"tokens/s, {count(row.requests)} at once")
            plain.append(speed_cell(row.baseline_tokens_per_second, row.baseline_range))
        cells[row.method].append(speed_cell(row.tokens_per_second, row.range))
    for row_cells in cells.values():
        if len(row_cells) > 3:
            table.add(*row_cells)
    return table


def _remarks(report: Report, vllm: VllmFigures) -> list[str]:
    """Return the sentences of the table's note: what the columns mean, and which methods failed."""
    remarks = [
        "Tokens/s on the check's prompts, with the slowest and the fastest repeat. Per step: tokens"
        " kept per forward pass of the target. Identical: greedy answers equal to plain vLLM's. If"
        " the repeats of two methods overlap, the simpler one is named: plain before n-grams,"
        " n-grams before heads."
    ]
    if report.run:
        remarks.append("RUN_DIR is this run's directory.")
    for method in vllm.methods or []:
        if method.failed:
            remarks.append(f"{method.name} failed: {method.failed}.")
    for name, reason in (vllm.failed_loads or {}).items():
        remarks.append(f"{name} failed under load: {reason}.")
    return remarks


def _commands(advice: Sequence[Advice]) -> list[str]:
    """Return each command once, with the loads that it is for as a comment."""
    loads: dict[str, list[str]] = {}
    for each in advice:
        if each.command:
            loads.setdefault(each.command, []).append(count(each.requests))
    return [
        f"{command}  # {', '.join(of_command)} at a time" for command, of_command in loads.items()
    ]
