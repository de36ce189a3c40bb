"""Tables of the check in a report: engines, decoding methods, question categories, load.

An unknown cell is `-`. The table of a measurement that was not made has no rows.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.artifacts.check_result import (
    Baseline,
    Category,
    EngineFigures,
    NativeFigures,
    Percentiles,
    VllmFigures,
)
from pipeline.artifacts.tree_file import TreeFigures
from pipeline.formatting import UNKNOWN, count, percent, rate, ratio, show, times
from pipeline.report.facts import (
    expected_rate,
    greedy_matches,
    greedy_ties,
    measured_rate,
    on_new_answers,
    speedup_of,
)
from pipeline.report.report import Report
from pipeline.report.speeds import is_disturbed, speed_cell
from pipeline.report.text_table import Table


def check_table(report: Report) -> Table:
    """Build the report's table of the check's figures, one column per engine."""
    columns = engine_cells(report)
    table = Table("Check", ["", *columns])
    table.note = (
        "Acceleration rate: tokens kept per forward pass of the target, after the prefill. Natively"
        " the tree is verified, one prompt at a time; in vLLM a chain, all prompts at once. In"
        " parentheses the slowest and the fastest repeat."
    )
    labels = {}
    for column in columns.values():
        labels.update(column)
    for label in labels:
        table.add_known(label, *(column.get(label, UNKNOWN) for column in columns.values()))
    return table


def engine_cells(report: Report) -> dict[str, dict[str, str]]:
    """Format the figures of each engine that was checked: by engine, then by label."""
    found = {}
    native, vllm = report.native, report.vllm
    if native:
        cells = _engine_cells(native, report.tree)
        cells["overhead"] = times(native.overhead)
        if is_disturbed(native):
            cells["speedup"] = cells["overhead"] = UNKNOWN
        cells["acceptance"] = native.acceptance or UNKNOWN
        if native.temperature is not None:
            cells["acceptance"] += f", temperature {native.temperature:g}"
        cells["prompts"] = count(native.prompts)
        cells["prompts skipped"] = count(native.skipped_prompts)
        found["native"] = cells
    if vllm:
        cells = _engine_cells(vllm, vllm)
        shares = " ".join(map(percent, vllm.accepted_per_position or []))
        cells["steps that keep 1, 2, … drafted tokens"] = shares
        found["vLLM"] = cells
    return found


def _engine_cells(
    engine: EngineFigures, prediction: TreeFigures | VllmFigures | None
) -> dict[str, str]:
    """Format the figures that all engines have, by label."""
    return {
        "acceleration rate": measured_rate(engine),
        "expected": expected_rate(prediction),
        "speedup": speedup_of(engine),
        "overhead": UNKNOWN,
        "tokens/s, with heads": speed_cell(engine.tokens_per_second, engine.range),
        "tokens/s, plain": speed_cell(engine.baseline_tokens_per_second, engine.baseline_range),
        "greedy identical": greedy_matches(engine.greedy_match),
        "greedy ties": greedy_ties(engine),
        "answers seen in training": percent(engine.seen_share),
        "rate on new answers": on_new_answers(engine),
        "expected on new answers": expected_rate(prediction.new if prediction else None),
    }


def served_model_table(report: Report) -> Table:
    """Build the report's table of the check's rates on the target and on its served copy."""
    columns = ["", "rate on the target", "rate on the copy", "speedup", "tokens/s"]
    table = Table("Served model", [*columns, "greedy identical"])
    copy = report.served_model
    if not copy:
        return table
    table.note = f"{copy.model}, {copy.format}; its greedy text against itself alone."
    native, vllm = report.native, report.vllm
    for name, on_target, on_copy in (("native", native, copy.native), ("vLLM", vllm, copy.vllm)):
        if on_copy:
            table.add(
                name,
                measured_rate(on_target),
                measured_rate(on_copy),
                times(on_copy.speedup),
                rate(on_copy.tokens_per_second),
                greedy_matches(on_copy.greedy_match),
            )
    return table


def methods_table(report: Report) -> Table:
    """Build the report's table of native decoding methods: their rates and speeds."""
    table = Table("Methods", ["method", "per step", "tokens/s", "speedup", "identical"])
    table.note = (
        "Native decoding, one prompt at a time, without the prefills. Per step: tokens per forward"
        " pass of the target. Tokens/s: in parentheses the slowest and the fastest repeat."
        " Generate, prompt lookup and assistant are transformers' own; retrieval drafts from the"
        " training text."
    )
    native = report.native
    if not native:
        return table
    plain = speed_cell(native.baseline_tokens_per_second, native.baseline_range)
    table.add("plain", ratio(1.0), plain, times(1.0), UNKNOWN)
    methods: dict[str, NativeFigures | Baseline] = {"heads": native}
    for baseline in native.baselines or []:
        name = baseline.name.replace("-", " ")
        methods[name] = replace(baseline, baseline_range=native.baseline_range)
        if baseline.failed:
            table.note += f" {name} failed: {baseline.failed}"
    for name, method in methods.items():
        table.add(
            name,
            ratio(method.acceleration_rate),
            speed_cell(method.tokens_per_second, method.range),
            speedup_of(method),
            greedy_matches(method.greedy_match),
        )
    return table


def categories_table(report: Report) -> Table:
    """Build the report's table of methods by question category; no rows for one category."""
    table = Table("Categories", ["tokens per step"])
    table.note = "In parentheses the native speedup over plain decoding."
    found: dict[str, list[Category] | None] = {}
    if report.native:
        found["heads"] = report.native.categories
        for baseline in report.native.baselines or []:
            found[baseline.name.replace("-", " ")] = baseline.categories
    if report.vllm:
        for method in report.vllm.methods or []:
            found[f"vLLM: {method.name}"] = method.categories
    for name, rows in found.items():
        if not rows or len(rows) < 2:
            continue
        table.columns[1:] = [row.category for row in rows]
        cells = []
        for row in rows:
            speedup = ""
            if row.speedup is not None:
                speedup = f" ({times(row.speedup)})"
            cells.append(ratio(row.acceleration_rate) + speedup)
        table.add(name, *cells)
    return table


def load_study_table(report: Report) -> Table:
    """Build the report's table of the latencies of vLLM's server by concurrent requests."""
    table = Table("Study: load", ["method", "requests"])
    for measure in ("to first", "per token"):
        table.columns += [f"{measure}, plain", f"{measure}, drafting"]
    table.note = (
        "vLLM as a server with this many requests at once: milliseconds to the first token and per"
        " further one, p50 / p90 / p99 of the requests. Client and server share the machine."
    )
    for row in report.studies.load or []:
        waited = (row.baseline_ttft_ms, row.ttft_ms, row.baseline_tpot_ms, row.tpot_ms)
        table.add(row.method, count(row.requests), *map(_percentiles, waited))
    return table


def _percentiles(times: Percentiles | None) -> str:
    """Format a latency's percentiles as one table cell: `31 / 40 / 52`, or `-` if unknown."""
    if times is None:
        return UNKNOWN
    return " / ".join(show(time, ".3g") for time in (times.p50, times.p90, times.p99))
