"""Tables of the check in a report: engines, decoding methods, question categories, studies.

An unknown cell is `-`. The table of a measurement that was not made has no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.artifacts.check_result import (
    Baseline,
    Category,
    EngineFigures,
    NativeFigures,
    Percentiles,
    TreeRow,
    VllmFigures,
)
from pipeline.artifacts.tree_file import TreeFigures
from pipeline.formatting import (
    UNKNOWN,
    count,
    duration,
    percent,
    quotient,
    rate,
    ratio,
    show,
    times,
)
from pipeline.report.facts import (
    expected_rate,
    greedy_matches,
    greedy_ties,
    measured_rate,
    native_speedup,
    on_new_answers,
    overhead_of,
    speedup_of,
    tie_limit,
)
from pipeline.report.report import Report
from pipeline.report.speeds import range_cell, speed_cell
from pipeline.report.text_table import Table

COSTS = ("acceleration rate", "step time", "speed")
RELATIVE = (
    "Step time and speed are relative to the export's own tree, whose overhead and speedup the"
    " check measures."
)
PLAIN_OF = {"heads": "plain", "vLLM: heads": "vLLM: plain"}  # measured in turns with these heads
SPEEDS = ("tokens/s, plain", "tokens/s, with heads", "speedup")


def check_table(report: Report) -> Table:
    """Build the report's table of the check's figures, one column per engine."""
    table = Table("Check", [""])
    columns = []
    if report.native:
        table.columns.append("native")
        columns.append(_native_cells(report.native, report.tree))
    if report.vllm:
        table.columns.append("vLLM")
        columns.append(_vllm_cells(report.vllm))
        table.note = (
            "Acceleration rates are tokens kept over forwards of the target, without the prefill"
            " and its token, in either engine. Speedup and tokens/s: natively one prompt at a time,"
            " in vLLM all prompts at once; in parentheses the slowest and the fastest repeat."
            " Accepted per position: the share of vLLM's steps that keep at least 1, 2, … drafted"
            " tokens."
        )
    labels = {}
    for column in columns:
        labels.update(column)
    for label in labels:
        table.add_known(label, *(column.get(label, UNKNOWN) for column in columns))
    return table


def _native_cells(native: NativeFigures, tree: TreeFigures | None) -> dict[str, str]:
    """Format native decoding's column of the check table, by row label."""
    cells = _engine_cells(native, tree)
    cells["speedup"] = native_speedup(native)
    cells["overhead"] = overhead_of(native)
    cells["acceptance"] = native.acceptance or UNKNOWN
    settings = {
        "temperature": native.temperature,
        "eps": native.eps,
        "delta": native.delta,
        "top_p": native.top_p,
    }
    for name, value in settings.items():
        if value is not None:
            cells["acceptance"] += f", {name} {value:g}"
    for rule, value in (native.log_likelihood or {}).items():
        cells[f"log-likelihood, {rule}"] = f"{ratio(value)} nats per token"
    cells["prompts"] = count(native.prompts)
    cells["prompts skipped"] = count(native.skipped_prompts)
    return cells


def _vllm_cells(vllm: VllmFigures) -> dict[str, str]:
    """Format vLLM's column of the check table, by row label."""
    cells = _engine_cells(vllm, vllm)
    cells["the same chain on the same text, natively"] = ratio(vllm.same_text_acceleration_rate)
    cells["accepted per position"] = " ".join(map(percent, vllm.accepted_per_position or []))
    return cells


def _engine_cells(
    engine: EngineFigures, prediction: TreeFigures | VllmFigures | None
) -> dict[str, str]:
    """Format the cells of the check table that all engines have, by row label."""
    return {
        "acceleration rate": measured_rate(engine),
        "expected": expected_rate(prediction),
        "answers seen in training": percent(engine.seen_share),
        "acceleration rate on new answers": on_new_answers(engine),
        "speedup": speedup_of(engine),
        "greedy identical": greedy_matches(engine.greedy_match),
        "greedy ties": greedy_ties(engine.greedy_match),
        "tie tolerance": tie_limit(engine),
        "tokens/s": speed_cell(engine.tokens_per_second, engine.range),
        "tokens/s, plain": speed_cell(engine.baseline_tokens_per_second, engine.baseline_range),
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
    """Build the report's table of native methods: tokens per forward and second, latencies."""
    columns = ["method", "per step", "tokens/s", "speedup", "to first", "identical"]
    table = Table("Methods", columns)
    table.note = (
        "Per step: tokens per forward of the target. Tokens/s: those of all answers over the time"
        " of all, one prompt at a time and without the prefills: the median of the repetitions, and"
        " in parentheses the slowest and the fastest."
        " To first: the median time to an answer's first token. Generate, prompt lookup and"
        " assistant are transformers' own. What to serve has the methods in vLLM."
    )
    if report.native:
        native = report.native
        plain = speed_cell(native.baseline_tokens_per_second, native.baseline_range)
        to_first = duration(native.baseline_time_to_first_token)
        table.add("plain", ratio(1.0), plain, times(1.0), to_first, UNKNOWN)
        _add_method(table, "with heads", native, native_speedup(native))
        for other in native.baselines or []:
            name = other.name.replace("-", " ")
            speedup = speedup_of(replace(other, baseline_range=native.baseline_range))
            _add_method(table, name, other, speedup)
            if other.failed:
                table.note += f" {name} failed: {other.failed}"
            elif other.datastore:
                table.note += (
                    f" {name} drafts from {count(other.datastore.tokens)} tokens of training text,"
                    f" indexed in {duration(other.datastore.build_seconds)}, and has a guess in"
                    f" {percent(other.drafted_share)} of its steps."
                )
    return table


def _add_method(table: Table, name: str, method: NativeFigures | Baseline, speedup: str) -> None:
    """Add a decoding method to the table of methods."""
    table.add(
        name,
        ratio(method.acceleration_rate),
        speed_cell(method.tokens_per_second, method.range),
        speedup,
        duration(method.time_to_first_token),
        greedy_matches(method.greedy_match),
    )


def categories_table(report: Report) -> Table:
    """Build the report's table of native speed by question category; no rows for fewer than two."""
    table = Table("Categories", ["category", "prompts", "per step", *SPEEDS])
    table.note = "Tokens per forward of the target, and per second."
    rows = []
    if report.native:
        rows = report.native.categories or []
    if len(rows) < 2:
        return table
    for row in rows:
        speeds = rate(row.baseline_tokens_per_second), rate(row.tokens_per_second)
        cells = ratio(row.acceleration_rate), *speeds, times(row.speedup)
        table.add(row.category, count(row.prompts), *cells)
    return table


def tables_by_category(report: Report) -> dict[str, Table]:
    """Build the report's tables of decoding methods by question category: rates and speeds.

    The table of rates also has the trees of the study, which decode nothing. With fewer than two
    categories the tables have no rows.
    """
    rates = Table("Methods by category", ["tokens per step"])
    speeds = Table("Speeds by category", ["tokens/s, one prompt at a time"])
    speeds.note = "Natively over all prompts of a category, in vLLM over a few of them."
    found: dict[str, list[Category]] = {}
    if report.native:
        found["heads"] = report.native.categories or []
        for other in report.native.baselines or []:
            found[other.name] = other.categories or []
    if report.vllm:
        for method in report.vllm.methods or []:
            found[f"vLLM: {method.name}"] = method.categories or []
    for name, rows in found.items():
        if len(rows) < 2:
            continue
        names = [row.category for row in rows]
        rates.columns[1:] = speeds.columns[1:] = names
        rates.add(name, *[ratio(row.acceleration_rate) for row in rows])
        if name in PLAIN_OF:
            speeds.add(PLAIN_OF[name], *[rate(row.baseline_tokens_per_second) for row in rows])
        speeds.add(name, *[rate(row.tokens_per_second) for row in rows])
    for tree in report.studies.trees or []:
        if tree.categories:
            rates.columns[1:] = rates.columns[1:] or tree.categories
            of_tree = [ratio(tree.categories.get(name)) for name in rates.columns[1:]]
            rates.add(f"tree: {tree.tree}", *of_tree)
    return {"rates_by_category": rates, "speeds_by_category": speeds}


def exact_match_table(report: Report) -> Table:
    """Build the report's table of answers that match their reference, by question category."""
    table = Table("Exact match", ["category", "answers"])
    table.note = (
        "Answers that are their reference, but for case, punctuation and articles; of a number the"
        " last one counts."
    )
    rows = []
    if report.check:
        rows = report.check.exact_match or []
    for row in rows:
        for name in row:
            if name not in table.columns:
                table.columns.append(name)
    for row in rows:
        shares = [percent(row.get(method)) for method in table.columns[2:]]
        table.add(str(row["category"]), count(row["answers"]), *shares)
    return table


def study_tables(report: Report) -> dict[str, Table]:
    """Build the report's tables of studies, by name; the table of a study not run has no rows."""
    studies = report.studies
    trees = Table("Study: trees", ["tree", "nodes", *COSTS])
    trees.note = (
        f"Trees from the top-1 chain to the export's own, on all the check's prompts. {RELATIVE}"
    )
    rows = studies.trees or []
    for row in rows[1:]:  # after plain decoding
        trees.add(str(row.tree), count(row.nodes), *_costs(row, rows))
    heads = Table("Study: heads used", ["heads", "nodes", *COSTS])
    heads.note = f"The export's tree, cut at each depth. {RELATIVE}"
    rows = studies.heads or []
    for row in rows:
        heads.add(count(row.heads), count(row.nodes), *_costs(row, rows))
    columns = ["temperature", "rule", "eps", "acceleration rate", "speedup", "log-likelihood"]
    typical = Table("Study: typical acceptance", columns, words=(0, 1))
    typical.note = (
        "delta is sqrt(eps); the speedup is over plain decoding at the same temperature, the"
        " log-likelihood in nats per token under the target at temperature 1."
    )
    for rule in studies.typical or []:
        cells = [ratio(rule.acceleration_rate), times(rule.speedup), ratio(rule.log_likelihood)]
        typical.add(show(rule.temperature, ".1f"), rule.rule, ratio(rule.eps), *cells)
    return {
        "study_trees": trees,
        "study_typical": typical,
        "study_heads": heads,
        "study_load": _load_study(report),
    }


def _costs(row: TreeRow, rows: Sequence[TreeRow]) -> tuple[str, str, str]:
    """Format a tree's acceleration rate, and its step time and speed relative to the last tree."""
    own = rows[-1]
    cells = times(quotient(row.overhead, own.overhead)), times(quotient(row.speedup, own.speedup))
    return ratio(row.acceleration_rate), *cells


def _load_study(report: Report) -> Table:
    """Build the report's table of vLLM's speed and latencies by concurrent requests."""
    speeds = ["tokens/s, plain", "tokens/s, drafting", "speedup"]
    table = Table("Study: load", ["method", "requests", "per draft", *speeds])
    rows = report.studies.load or []
    measures = ["to first", "per token"]
    has_limits = any(row.within_slo is not None for row in rows)
    if has_limits:
        measures.append("within limits")
    for measure in measures:
        table.columns += [f"{measure}, plain", f"{measure}, drafting"]
    table.note = (
        "vLLM as a server, with so many requests at once: tokens/s of the slowest pass and the"
        " fastest, which counts; time to the first token and per further one in ms, p50 / p90 /"
        " p99 of the requests. Prompts repeat where they are fewer. Client and server share the"
        " machine. Per draft: the answers' tokens without the first of each, over the drafts that"
        " the server counts. Steps without a draft are not counted here, and are in the check's"
        " rate per step."
    )
    limits = None
    draft_tokens = {}
    if report.vllm:
        limits = report.vllm.batch_limits
        for method in report.vllm.methods or []:
            config = method.speculative_config or {}
            draft_tokens[method.name] = config.get("num_speculative_tokens", 0)
    if limits is not None:
        table.note += (
            " By arithmetic, a step of this target on this GPU is bound by memory up to"
            f" {count(limits.memory_bound_tokens)} tokens; loads at which it verifies more, one"
            " token and the drafts of each request, are marked *. The memory of its GPUs"
            f" holds {count(limits.sequences)} sequences of {count(limits.sequence_tokens)} tokens."
        )
    for row in rows:
        requests = count(row.requests)
        verified = row.requests * (1 + draft_tokens.get(row.method, 0))
        if limits is not None and verified > limits.memory_bound_tokens:
            requests += " *"
        cells = [
            ratio(row.acceleration_rate),
            range_cell(row.baseline_range),
            range_cell(row.range),
            times(row.speedup),
        ]
        for waited in (row.baseline_ttft_ms, row.ttft_ms, row.baseline_tpot_ms, row.tpot_ms):
            cells.append(_percentiles(waited))
        if has_limits:
            cells += [percent(row.baseline_within_slo), percent(row.within_slo)]
        table.add(row.method, requests, *cells)
    return table


def _percentiles(times: Percentiles | None) -> str:
    """Format a latency's percentiles as one table cell: `31 / 40 / 52`, or `-` if unknown."""
    if times is None:
        return UNKNOWN
    return " / ".join(show(time, ".3g") for time in (times.p50, times.p90, times.p99))
