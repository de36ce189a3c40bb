"""The table of all ways to decode that the check measured, side by side, as papers of this field have it."""

from __future__ import annotations

from typing import Any

from pipeline.report.facts import Table, identical, pick
from pipeline.report.wording import UNKNOWN, count, duration, rate, ratio, times

NOTE = (
    "Tokens per forward of the target and per second, time to the first token and per further one. Speedups are over "
    "plain decoding with the same engine; generate, prompt lookup and assistant are transformers' own; vLLM decodes "
    "all prompts at once, and with the heads' top-1 chain, not the tree"
)


def methods_table(report: dict) -> Table:
    """One row per method: what the target wrote per forward and per second, and how long its tokens took."""
    native, vllm = pick(report, "check", "native"), pick(report, "check", "vllm")
    rows, failed = [], []
    if native:
        rows += [_row("plain", _plain_of(native)), _row("Medusa", native)]
        for other in pick(native, "baselines") or []:
            name = str(other.get("name")).replace("-", " ")
            if reason := other.get("failed"):
                failed.append(f"{name} failed: {reason}")
                rows.append((name, "failed", *[UNKNOWN] * 5))
            else:
                rows.append(_row(name, other))
    if vllm:
        rows += [_row("vLLM plain", _plain_of(vllm)), _row("vLLM Medusa", vllm)]
    columns = ("method", "per step", "tokens/s", "speedup", "to first", "per token", "identical")
    repeats = pick(native, "repeats") or 1
    medians = [f"Times are medians of {count(repeats)} repetitions"] if repeats > 1 else []
    return Table("Methods", columns, tuple(rows), ". ".join([NOTE, *medians, *failed]).rstrip(".") + ".")


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
