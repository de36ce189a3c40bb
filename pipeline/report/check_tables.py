"""The tables of the check: one column per engine, one row per decoding method, and studies.

An unknown cell is `-`; a table without rows was not run.
"""

from __future__ import annotations

from pipeline.artifacts.check_result import (
    BatchRow,
    Category,
    EngineFigures,
    LoadRow,
    NativeFigures,
    Percentiles,
    TreeRow,
    TypicalRow,
    VllmFigures,
)
from pipeline.artifacts.tree_file import TreeFigures
from pipeline.formatting import (
    UNKNOWN,
    count,
    duration,
    percent,
    rate,
    ratio,
    show,
    times,
)
from pipeline.report.facts import (
    expected_rate,
    has_seen_answers,
    identical,
    measured_rate,
    on_new_answers,
)
from pipeline.report.report import Report
from pipeline.report.tables import Table

COSTS = ("acceleration rate", "overhead", "speedup")
SPEEDS = ("tokens/s, plain", "tokens/s, with heads", "speedup")
CHECK_ROWS = (
    "acceleration rate",
    "expected",
    "answers seen in training",
    "acceleration rate on new answers",
    "expected on new answers",
    "the same chain on the same text, natively",
    "overhead",
    "speedup",
    "greedy identical",
    "greedy ties",
    "tokens/s",
    "tokens/s, plain",
    "time to first token",
    "accepted per position",
    "log-likelihood, nats per token",
    "acceptance",
    "prompts",
    "prompts skipped",
)


def check_table(report: Report) -> Table:
    """One column per engine; rows that no engine has are left out."""
    table = Table("Check", [""])
    native, vllm = report.native, report.vllm
    with_new = has_seen_answers(report)
    columns = []
    if native:
        table.columns.append("native")
        columns.append(_native_cells(native, report.tree, with_new))
    if vllm:
        table.columns.append("vLLM")
        columns.append(_vllm_cells(vllm, with_new))
        table.note = (
            "Acceleration rates are tokens kept over forwards of the target, without the prefill"
            " and its token, in either engine. Accepted per position: the share of vLLM's steps"
            " that keep at least 1, 2, … drafted tokens."
        )
    for label in CHECK_ROWS:
        table.add_known(label, *(column.get(label, UNKNOWN) for column in columns))
    return table


def _native_cells(
    native: NativeFigures, tree: TreeFigures | None, with_new: bool
) -> dict[str, str]:
    cells = _engine_cells(native, tree, with_new)
    cells["overhead"] = times(native.overhead)
    cells["time to first token"] = duration(native.time_to_first_token)
    if native.log_likelihood:
        values = [f"{name} {ratio(value)}" for name, value in native.log_likelihood.items()]
        cells["log-likelihood, nats per token"] = ", ".join(values)
    cells["acceptance"] = _acceptance(native)
    cells["prompts"] = count(native.prompts)
    cells["prompts skipped"] = count(native.skipped_prompts)
    return cells


def _vllm_cells(vllm: VllmFigures, with_new: bool) -> dict[str, str]:
    cells = _engine_cells(vllm, vllm, with_new)
    cells["the same chain on the same text, natively"] = ratio(vllm.same_text_acceleration_rate)
    if vllm.accepted_per_position:
        cells["accepted per position"] = " ".join(map(percent, vllm.accepted_per_position))
    return cells


def _engine_cells(
    engine: EngineFigures, prediction: TreeFigures | VllmFigures | None, with_new: bool
) -> dict[str, str]:
    ties = count(engine.greedy_match.ties)
    if engine.tie_tolerance is not None:
        ties += f"; a top-2 gap under {engine.tie_tolerance:g} is one"
    cells = {
        "acceleration rate": measured_rate(engine),
        "expected": expected_rate(prediction),
        "speedup": times(engine.speedup),
        "greedy identical": identical(engine.greedy_match),
        "greedy ties": ties,
        "tokens/s": rate(engine.tokens_per_second),
        "tokens/s, plain": rate(engine.baseline_tokens_per_second),
    }
    if with_new:
        cells["answers seen in training"] = percent(engine.seen_share)
        cells["acceleration rate on new answers"] = on_new_answers(engine)
        new = prediction.new if prediction else None
        cells["expected on new answers"] = expected_rate(new)
    return cells


def _acceptance(native: NativeFigures) -> str:
    """The acceptance rule and its parameters."""
    if native.acceptance is None:
        return UNKNOWN
    parts = [native.acceptance]
    if native.temperature is not None:
        parts.append(f"temperature {native.temperature:g}")
    if native.eps is not None:
        parts.append(f"eps {native.eps:g}")
    if native.delta is not None:
        parts.append(f"delta {native.delta:g}")
    if native.top_p is not None:
        parts.append(f"top_p {native.top_p:g}")
    if native.first_token is not None:
        parts.append(f"first token {native.first_token}")
    return ", ".join(parts)


def served_model_table(report: Report) -> Table:
    """The heads on the copy that will be served beside those on their target, by engine."""
    columns = ["", "rate on the target", "rate on the copy", "speedup", "tokens/s"]
    table = Table("Served model", [*columns, "greedy identical"])
    copy = report.served_model
    if not copy:
        return table
    table.note = f"{copy.model}, {copy.format}; its greedy text against itself alone."
    native, vllm = report.native, report.vllm
    for name, on_target, on_copy in (
        ("native", native, copy.native),
        ("vLLM", vllm, copy.vllm),
    ):
        if on_copy:
            table.add(
                name,
                measured_rate(on_target),
                measured_rate(on_copy),
                times(on_copy.speedup),
                rate(on_copy.tokens_per_second),
                identical(on_copy.greedy_match),
            )
    return table


def methods_table(report: Report) -> Table:
    """One row per decoding method: tokens per forward and per second, and latencies."""
    columns = ["method", "per step", "tokens/s", "speedup", "to first", "per token", "identical"]
    table = Table("Methods", columns)
    notes = [
        "Tokens per forward of the target and per second, time to the first token and per further"
        " one. Speedups are over plain decoding with the same engine; generate, prompt lookup and"
        " assistant are transformers' own; vLLM decodes all prompts at once, and with the heads'"
        " top-1 chain, not the tree"
    ]
    native, vllm = report.native, report.vllm
    if native:
        if native.repeats is not None and native.repeats > 1:
            notes.append(f"Times are medians of {count(native.repeats)} repetitions")
        if native.threads is not None:
            threads = "thread" if native.threads == 1 else "threads"
            notes.append(f"Native steps are timed on {native.threads} CPU {threads}")
        notes += _add_native_methods(table, native)
    if vllm:
        plain, with_heads = rate(vllm.baseline_tokens_per_second), rate(vllm.tokens_per_second)
        table.add("vLLM plain", ratio(1.0), plain, times(1.0), UNKNOWN, UNKNOWN, UNKNOWN)
        table.add(
            "vLLM with heads",
            ratio(vllm.acceleration_rate),
            with_heads,
            times(vllm.speedup),
            UNKNOWN,
            UNKNOWN,
            identical(vllm.greedy_match),
        )
    table.note = ". ".join(notes).rstrip(".") + "."
    return table


def _add_native_methods(table: Table, native: NativeFigures) -> list[str]:
    """Add plain decoding, the heads and transformers' methods; return why any failed."""
    table.add(
        "plain",
        ratio(1.0),
        rate(native.baseline_tokens_per_second),
        times(1.0),
        duration(native.baseline_time_to_first_token),
        duration(native.baseline_time_per_output_token),
        UNKNOWN,
    )
    table.add(
        "with heads",
        ratio(native.acceleration_rate),
        rate(native.tokens_per_second),
        times(native.speedup),
        duration(native.time_to_first_token),
        duration(native.time_per_output_token),
        identical(native.greedy_match),
    )
    failed = []
    for other in native.baselines or []:
        name = other.name.replace("-", " ")
        if other.failed:
            failed.append(f"{name} failed: {other.failed}")
        table.add(
            name,
            "failed" if other.failed else ratio(other.acceleration_rate),
            rate(other.tokens_per_second),
            times(other.speedup),
            duration(other.time_to_first_token),
            duration(other.time_per_output_token),
            identical(other.greedy_match),
        )
    return failed


def categories_table(report: Report) -> Table:
    """Speed by category of question; empty for a single category, which repeats the check."""
    table = Table("Categories", ["category", "prompts", "per step", *SPEEDS])
    table.note = "Tokens per forward of the target, and per second."
    rows = []
    if report.native:
        rows = report.native.categories or []
    if len(rows) == 1:
        return table
    for row in rows:
        table.add(row.category, count(row.prompts), ratio(row.acceleration_rate), *_speeds(row))
    return table


def _speeds(row: Category | BatchRow | LoadRow) -> tuple[str, str, str]:
    """Tokens per second, plain and with heads, and the speedup."""
    plain = rate(row.baseline_tokens_per_second)
    return plain, rate(row.tokens_per_second), times(row.speedup)


def exact_match_table(report: Report) -> Table:
    """The share of answers equal to their reference, by category; empty without references."""
    table = Table("Exact match", ["category", "answers"])
    table.note = (
        "Answers that are their reference, but for case, punctuation and articles; of a number the"
        " last one counts."
    )
    rows = []
    if report.check:
        rows = report.check.exact_match or []
    methods: list[str] = []
    for row in rows:
        methods += [name for name in row if name not in ("category", "answers", *methods)]
    table.columns += methods
    for row in rows:
        shares = [percent(row.get(method)) for method in methods]
        table.add(str(row["category"]), count(row["answers"]), *shares)
    return table


def study_tables(report: Report) -> dict[str, Table]:
    """`study_…` for each study; without rows where it was not run."""
    studies = report.studies
    trees = Table("Study: trees", ["tree", "nodes", *COSTS])
    trees.note = (
        "One ladder of trees on all the check's prompts, from plain decoding to the export's own."
    )
    for row in studies.trees or []:
        trees.add(str(row.tree), count(row.nodes), *_costs(row))
    heads = Table("Study: heads used", ["heads", "nodes", *COSTS])
    heads.note = "The export's tree, cut at each depth."
    for row in studies.heads or []:
        heads.add(count(row.heads), count(row.nodes), *_costs(row))
    batch = Table("Study: batch size", ["sequences", *SPEEDS])
    batch.note = "The same prompts, decoded 1 to 16 at a time; prefill included."
    for size in studies.batch or []:
        batch.add(count(size.batch_size), *_speeds(size))
    return {
        "study_trees": trees,
        "study_typical": _typical_study(studies.typical or []),
        "study_heads": heads,
        "study_batch": batch,
        "study_load": _load_study(report),
    }


def _costs(row: TreeRow) -> tuple[str, str, str]:
    return ratio(row.acceleration_rate), times(row.overhead), times(row.speedup)


def _typical_study(rows: list[TypicalRow]) -> Table:
    columns = ["temperature", "rule", "eps", "acceleration rate", "speedup", "log-likelihood"]
    table = Table("Study: typical acceptance", columns, words=(0, 1))
    table.note = (
        "delta is sqrt(eps); the speedup is over plain decoding at the same temperature, the"
        " log-likelihood in nats per token under the target at temperature 1."
    )
    for row in rows:
        cells = [ratio(row.acceleration_rate), times(row.speedup), ratio(row.log_likelihood)]
        table.add(show(row.temperature, ".1f"), row.rule, ratio(row.eps), *cells)
    return table


def _load_study(report: Report) -> Table:
    table = Table("Study: load", ["requests", "per step", *SPEEDS])
    table.columns += ["to first, plain", "to first, with heads"]
    table.columns += ["per token, plain", "per token, with heads"]
    rows = report.studies.load or []
    with_limits = bool(rows) and rows[0].within_slo is not None
    if with_limits:
        table.columns += ["within limits, plain", "within limits, with heads"]
    table.note = (
        "vLLM as a server, with so many requests at once; time to the first token and per further"
        " one in ms, p50 / p90 / p99 of the requests. Client and server share the machine. Per"
        " step: the answers' tokens without the first of each, over the drafts that the server"
        " counts; the check counts the forwards of each request instead."
    )
    if report.vllm and report.vllm.under_load:
        table.note += f" {report.vllm.under_load}"
    for row in rows:
        cells = [ratio(row.acceleration_rate), *_speeds(row)]
        for waited in (row.baseline_ttft_ms, row.ttft_ms, row.baseline_tpot_ms, row.tpot_ms):
            cells.append(_percentiles(waited))
        if with_limits:
            cells += [percent(row.baseline_within_slo), percent(row.within_slo)]
        table.add(count(row.requests), *cells)
    return table


def _percentiles(times: Percentiles | None) -> str:
    if times is None:
        return UNKNOWN
    return " / ".join(show(time, ".3g") for time in (times.p50, times.p90, times.p99))
