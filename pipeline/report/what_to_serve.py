"""The report's first table: what to serve in vLLM at each measured load."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from itertools import groupby

from pipeline.artifacts.check_result import LoadRow, ServingChoice
from pipeline.formatting import count, percent, rate, ratio, times
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
    by_method: dict[str, list[LoadRow]] = {}
    for row in report.studies.load or vllm.loads or []:
        by_method.setdefault(row.method, []).append(row)
    best = {choice.requests: choice.method for choice in vllm.choices or []}
    for row in by_method.get(HEADS, []):
        table.columns.append(f"tokens/s, {count(row.requests)} at once")
    if HEADS in by_method:
        cells = [ratio(1.0), "-"]
        for row in by_method[HEADS]:
            speed = _speed(row.baseline_tokens_per_second, row.baseline_within_slo)
            cells.append(_marked(speed, best.get(row.requests) == PLAIN))
        table.add(PLAIN, *cells)
    table.note = " ".join(serving_advice(report))
    for method in vllm.methods or []:
        if method.failed:
            table.note += f" {method.name} failed: {method.failed}."
        if method.name not in by_method:
            continue
        cells = [ratio(method.acceleration_rate), greedy_matches(method.greedy_match)]
        for row in by_method[method.name]:
            speed = _speed(row.tokens_per_second, row.within_slo)
            cells.append(_marked(speed, best.get(row.requests) == method.name))
        table.add(method.name, *cells)
    return table


def _speed(tokens_per_second: float | None, within_slo: float | None) -> str:
    """Format a speed, with the share of requests within `check.slo` where there are limits."""
    speed = rate(tokens_per_second)
    return speed if within_slo is None else f"{speed} ({percent(within_slo)} in time)"


def _marked(speed: str, is_best: bool) -> str:
    """Return a speed, marked if it is the best of its load."""
    return f"{speed} best" if is_best else speed


def serving_advice(report: Report) -> list[str]:
    """Say in a sentence for each range of loads what to serve, and the command for it."""
    sentences: list[str] = []
    if report.vllm is None:
        return sentences
    for method, group in groupby(report.vllm.choices or [], key=lambda choice: choice.method):
        choices = list(group)
        sentences.append(f"{_loads(choices)}: {_verdict(method, choices)}.")
        sentences.append(f"Command: {_command(method, report)}")
    return sentences


def _loads(choices: Sequence[ServingChoice]) -> str:
    """Name a range of loads: `1 request at once`, `4 to 64 requests at once`."""
    first, last = choices[0].requests, choices[-1].requests
    if first != last:
        return f"{first:,} to {last:,} requests at once"
    return f"{first:,} request at once" if first == 1 else f"{first:,} requests at once"


def _verdict(method: str, choices: Sequence[ServingChoice]) -> str:
    """Say what to serve at these loads, by how much it is faster, and whether that is certain."""
    margins = {choice.margin: choice.second for choice in choices if choice.margin is not None}
    lead = "alone in time"
    if margins:
        least = min(margins)
        lead = f"{least:.0%} faster than {margins[least]}"
        if len(choices) > 1:
            lead = f"at least {lead}"
    certain = [choice.is_beyond_scatter for choice in choices]
    if None in certain:
        lead += " (one repeat: its scatter is unknown)"
    elif all(certain):
        lead += " (more than repeats scatter)"
    else:
        lead += " (no more than repeats scatter)"
    if method == PLAIN:
        return f"serve none, plain vLLM is {lead}"
    gains = [choice.speedup for choice in choices]
    gain = times(min(gains))
    if times(max(gains)) != gain:
        gain += f" to {times(max(gains))}"
    return f"serve {method}, {gain} plain vLLM and {lead}"


def _command(name: str, report: Report) -> str:
    """Return the command that serves a method."""
    if name == HEADS:
        return "medusa-distill serve RUN_DIR"
    words = ["vllm", "serve", report.target or "TARGET"]
    assert report.vllm is not None
    for method in report.vllm.methods or []:
        if method.name == name and method.speculative_config:
            if name.startswith(HEADS):
                number = method.speculative_config["num_speculative_tokens"]
                return f"medusa-distill run CONFIG calibrate.draft_tokens={number}"
            words += ["--speculative-config", json.dumps(method.speculative_config)]
    return shlex.join(words)
