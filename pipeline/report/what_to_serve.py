"""Choice of what to serve: vLLM's decoding methods at each measured load, and the fastest.

The loads are those of the study `load` if it was made, else those of the check: one prompt after
another, and all at once. A method's speed counts as far as its requests are within `check.slo`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pipeline.artifacts.check_result import LoadRow, ServedMethod, Throughput
from pipeline.formatting import UNKNOWN, count, percent, rate, ratio, times
from pipeline.report.facts import greedy_matches
from pipeline.report.report import Report
from pipeline.report.text_table import Table

PLAIN, HEADS = "plain", "heads"


@dataclass(frozen=True)
class Choice:
    """The fastest method at one load, and the second; speeds of them and of plain decoding."""

    requests: int
    method: str
    speed: Throughput
    plain: Throughput
    next_method: str
    next_speed: Throughput

    @property
    def margin(self) -> float:
        """The share by which the method is faster than the second."""
        return _useful(self.speed) / _useful(self.next_speed) - 1

    @property
    def is_beyond_scatter(self) -> bool | None:
        """Whether all repeats are faster than those of the second; None with one repeat."""
        if self.speed.lowest is None or self.next_speed.highest is None:
            return None
        return self.speed.lowest > self.next_speed.highest


def what_to_serve_table(report: Report) -> Table:
    """Build the report's table of vLLM's methods by load, the fastest marked at each."""
    speeds = _speeds(report)
    loads = [each.requests for each in speeds.get(PLAIN, [])]
    table = Table("What to serve", ["method in vLLM", "drafts", "per step", "identical"])
    table.columns += [f"tokens/s, {count(load)} at once" for load in loads]
    best = {choice.requests: choice.method for choice in serving_choices(report)}
    for method in _methods(report):
        if method.name not in speeds:
            continue
        cells = [count(method.draft_tokens), ratio(method.acceleration_rate)]
        cells.append(greedy_matches(method.greedy_match) if method.greedy_match else UNKNOWN)
        for speed in speeds[method.name]:
            cell = rate(speed.tokens_per_second)
            if speed.within_slo is not None:
                cell += f" ({percent(speed.within_slo)} in time)"
            if best.get(speed.requests) == method.name:
                cell += " best"
            cells.append(cell)
        table.add(method.name, *cells)
    table.note = " ".join(serving_advice(report))
    for method in _methods(report):
        if method.failed:
            table.note += f" {method.name} failed: {method.failed}."
    return table


def serving_choices(report: Report) -> list[Choice]:
    """Return the fastest method at each load; empty if fewer than two methods were measured."""
    speeds = _speeds(report)
    found: list[Choice] = []
    if len(speeds) < 2:
        return found
    for place, plain in enumerate(speeds[PLAIN]):
        ranked = sorted(speeds, key=lambda name: -_useful(speeds[name][place]))
        first, second = ranked[:2]
        speed, next_speed = speeds[first][place], speeds[second][place]
        found.append(Choice(plain.requests, first, speed, plain, second, next_speed))
    return found


def serving_advice(report: Report) -> list[str]:
    """Say in a sentence for each range of loads what to serve, and the command for it."""
    methods = {method.name: method for method in _methods(report)}
    sentences = []
    for name, group in groupby(serving_choices(report), key=lambda choice: choice.method):
        choices = list(group)
        sentences.append(f"{_loads(choices)}: {_verdict(name, choices)}.")
        sentences.append(f"Command: {_command(methods[name], report.target or 'TARGET')}")
    return sentences


def _loads(choices: Sequence[Choice]) -> str:
    """Name a range of loads: `1 request at once`, `4 to 64 requests at once`."""
    first, last = choices[0].requests, choices[-1].requests
    if first != last:
        return f"{first:,} to {last:,} requests at once"
    return f"{first:,} request at once" if first == 1 else f"{first:,} requests at once"


def _verdict(name: str, choices: Sequence[Choice]) -> str:
    """Say what to serve at these loads, by how much it is faster, and whether that is certain."""
    closest = min(choices, key=lambda choice: choice.margin)
    lead = f"{closest.margin:.0%} faster than {closest.next_method}"
    if len(choices) > 1:
        lead = f"at least {lead}"
    certain = [choice.is_beyond_scatter for choice in choices]
    if None in certain:
        lead += " (one repeat: its scatter is unknown)"
    elif all(certain):
        lead += " (more than repeats scatter)"
    else:
        lead += " (no more than repeats scatter)"
    if name == PLAIN:
        return f"serve none, plain vLLM is {lead}"
    gains = [_useful(choice.speed) / _useful(choice.plain) for choice in choices]
    gain = times(min(gains))
    if times(max(gains)) != gain:
        gain += f" to {times(max(gains))}"
    return f"serve {name}, {gain} plain vLLM and {lead}"


def _command(method: ServedMethod, target: str) -> str:
    """Return the command that serves a method."""
    if method.name == HEADS:
        return "medusa-distill serve RUN_DIR"
    if method.name.startswith(HEADS):
        return f"medusa-distill run CONFIG calibrate.draft_tokens={method.draft_tokens}"
    words = ["vllm", "serve", target]
    if method.speculative_config is not None:
        words += ["--speculative-config", json.dumps(method.speculative_config)]
    return shlex.join(words)


def _methods(report: Report) -> list[ServedMethod]:
    """Return vLLM's measured methods, plain decoding first."""
    if report.vllm is None:
        return []
    return report.vllm.methods or []


def _speeds(report: Report) -> dict[str, list[Throughput]]:
    """Return each method's speed by load, plain decoding first; every method has all loads."""
    rows = report.studies.load
    if not rows:
        return {method.name: method.throughput for method in _methods(report) if method.throughput}
    found: dict[str, list[Throughput]] = {PLAIN: []}
    for row in rows:
        if row.method == rows[0].method:
            found[PLAIN].append(_plain_speed(row))
        found.setdefault(row.method, []).append(_speed(row))
    return found


def _speed(row: LoadRow) -> Throughput:
    """Return a method's speed at one load of the study."""
    lowest, highest = row.range or (None, None)
    return Throughput(
        requests=row.requests,
        tokens_per_second=row.tokens_per_second or 0,
        lowest=lowest,
        highest=highest,
        within_slo=row.within_slo,
    )


def _plain_speed(row: LoadRow) -> Throughput:
    """Return plain decoding's speed at one load of the study."""
    lowest, highest = row.baseline_range or (None, None)
    return Throughput(
        requests=row.requests,
        tokens_per_second=row.baseline_tokens_per_second or 0,
        lowest=lowest,
        highest=highest,
        within_slo=row.baseline_within_slo,
    )


def _useful(speed: Throughput) -> float:
    """Return the tokens per second of requests within `check.slo`; all without limits."""
    share = 1 if speed.within_slo is None else speed.within_slo
    return speed.tokens_per_second * share
