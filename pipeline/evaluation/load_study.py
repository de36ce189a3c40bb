"""The study of load (`check.studies: [load]`): the engine as a server, with the heads and without,
ever more at once.

Heads spend computation that few requests leave idle. The more are under way at once, the less is
idle, and from some number on the server is faster without them. Measured with the check's prompts;
client and server share the machine. A row holds, for plain decoding (`baseline_…`) and with the
heads:

    tokens_per_second  of all requests together
    ttft_ms, tpot_ms   time to the first token, and per further token: p50, p90 and p99 over
    requests within_slo         the share of requests within both limits of `check.slo`, where there
    are any

and with the heads `acceleration_rate`, over the drafts that the server counts (see `vllm_server`),
not over the forwards of each request as the check has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.config import LatencyLimits
from pipeline.evaluation.prompts import CheckRequest
from pipeline.evaluation.served import drafting
from pipeline.evaluation.speed import rounded
from pipeline.execution.progress import ProgressReporter
from pipeline.targets.vllm_server import LoadTask, serve_under_load

LEVELS = (1, 2, 4, 8, 16, 32, 64)
PERCENTILES = (50, 90, 99)


def load_study(request: CheckRequest, progress: ProgressReporter | None = None) -> dict[str, Any]:
    """The study of an export, measured `check.repeats` times: `studies` of an engine, and
    `under_load`.
    """
    if progress:
        progress.begin("vLLM's server starts", 0, unit="loads")
    settings = request.settings
    with_heads, _ = drafting(request)
    task = LoadTask(
        request.target,
        [prompt.ids for prompt in request.prompts],
        settings.max_new_tokens,
        LEVELS,
        repeats=settings.repeats,
        gpus=request.gpus,
    )
    tasks = [task, replace(task, engine_args=with_heads)]
    plain, accelerated = serve_under_load(tasks, progress.report if progress else None)
    rows = load_rows(plain, accelerated, settings.slo)
    return {"studies": {"load": rows}, "under_load": in_words(rows)}


def load_rows(
    plain: Sequence[Mapping[str, Any]],
    with_heads: Sequence[Mapping[str, Any]],
    limits: LatencyLimits,
) -> list[dict[str, Any]]:
    """The study's rows, from what `serve_under_load` measured of both servers."""
    rows = []
    for before, after in zip(plain, with_heads, strict=True):
        baseline, found = _figures(before, limits), _figures(after, limits)
        speedup = rounded(found["tokens_per_second"] / baseline["tokens_per_second"])
        rate = after["acceleration_rate"] and rounded(after["acceleration_rate"])
        row = {"requests": after["requests"], "speedup": speedup, "acceleration_rate": rate}
        rows.append(row | found | {f"baseline_{key}": value for key, value in baseline.items()})
    return rows


def _figures(measured: Mapping[str, Any], limits: LatencyLimits) -> dict[str, Any]:
    ttft_N, tpot_N = (1000 * np.array(measured[key], dtype=float) for key in ("ttft", "tpot"))
    found: dict[str, Any] = {
        "tokens_per_second": rounded(measured["num_tokens"] / measured["seconds"])
    }
    for name, times_N in (("ttft_ms", ttft_N), ("tpot_ms", tpot_N[np.isfinite(tpot_N)])):
        values = (
            np.percentile(times_N, PERCENTILES) if len(times_N) else [math.nan] * len(PERCENTILES)
        )
        found[name] = {
            f"p{percent}": rounded(value)
            for percent, value in zip(PERCENTILES, values, strict=True)
        }
    if limits.ttft_ms or limits.tpot_ms:
        # An answer of one token has no further ones that could be late.
        late_N = (ttft_N > (limits.ttft_ms or math.inf)) | (
            np.nan_to_num(tpot_N) > (limits.tpot_ms or math.inf)
        )
        found["within_slo"] = rounded(1 - float(late_N.mean()))
    return found


def stops_paying_at(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The least measured number of requests at which the server is slower with the heads; None
    where there is none.
    """
    return next((row["requests"] for row in rows if not row["speedup"] >= 1), None)


def in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Up to how many requests at once the heads pay, and beyond that at which loads they do not, in
    a sentence.
    """
    levels, stops = [row["requests"] for row in rows], stops_paying_at(rows)
    if stops is None:
        return (
            f"Served by vLLM, the heads pay up to {levels[-1]} requests at once, the most that were"
            " tried."
        )
    slower = [row["requests"] for row in rows if not row["speedup"] >= 1]
    faster = [level for level in levels if level > stops and level not in slower]
    beyond = f"they are slower at {_listed(slower)}"
    if paid := levels[: levels.index(stops)]:
        again = f", and faster again at {_listed(faster)}" if faster else ""
        return f"Served by vLLM, the heads pay up to {paid[-1]} requests at once; {beyond}{again}."
    pay = f"pay at {_listed(faster)} requests at once alone" if faster else "do not pay"
    return f"Served by vLLM, the heads {pay}; {beyond}."


def _listed(levels: Sequence[int]) -> str:
    *others, last = map(str, levels)
    return f"{', '.join(others)} and {last}" if others else last
