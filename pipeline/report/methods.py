"""The table of all ways to decode that the check measured, side by side, as papers of this field have it."""

from __future__ import annotations

from typing import Any

from pipeline.report.facts import Table, identical, pick
from pipeline.report.wording import count, duration, rate, ratio, times

NAMES = {
    "generate": "transformers generate",
    "prompt-lookup": "transformers prompt lookup",
    "assistant": "transformers assistant",
}


def methods_table(report: dict) -> Table:
    """One row per method: what the target wrote per forward and per second, and how long its tokens took."""
    native, vllm = pick(report, "check", "native"), pick(report, "check", "vllm")
    rows, failed = [], []
    if native:
        rows += [_row("plain", _plain_of(native)), _row("Medusa", native)]
        for other in pick(native, "baselines") or []:
            name = NAMES.get(other.get("name"), str(other.get("name")))
            if reason := other.get("failed"):
                failed.append(f"{name} cannot decode this target: {reason}")
            else:
                rows.append(_row(name, other))
    if vllm:
        rows += [_row("vLLM plain", _plain_of(vllm)), _row("vLLM Medusa, top-1 chain", vllm)]
    columns = ("method", "tokens per forward", "tokens/s", "speedup", "first token", "per token", "identical")
    note = "Speedups are over plain decoding with the same engine"
    if (repeats := pick(native, "repeats")) and repeats > 1:
        note += f"; times are medians of {count(repeats)} repetitions"
    return Table("Methods", columns, tuple(rows), ". ".join([note, *failed]).rstrip(".") + ".")


def _plain_of(engine: dict) -> dict[str, Any]:
    """The plain side of an engine's figures, as one of its own."""
    plain = {key.removeprefix("baseline_"): value for key, value in engine.items() if key.startswith("baseline_")}
    return {"acceleration_rate": 1.0, "speedup": 1.0, **plain}


def _row(name: str, figures: dict) -> tuple[str, ...]:
    return (
        name,
        ratio(figures.get("acceleration_rate")),
        rate(figures.get("tokens_per_second")),
        times(figures.get("speedup")),
        duration(figures.get("time_to_first_token")),
        duration(figures.get("time_per_output_token")),
        identical(figures)[0],
    )
