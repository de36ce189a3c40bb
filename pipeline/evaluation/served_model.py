"""The heads on the copy of their target that will be served, usually a quantized one: the same
prompts once more.

Greedy text is compared with that copy alone, whose own text differs from the full target's. Neither
baselines nor studies are repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipeline.evaluation.native import check_native
from pipeline.evaluation.prompts import CheckRequest
from pipeline.evaluation.served import check_served
from pipeline.execution.progress import ProgressReporter
from pipeline.targets.spec import TargetSpec, format_of, model_config
from pipeline.targets.vllm_engine import in_vllm

CHECKS: dict[str, Callable[..., dict[str, Any]]] = {"native": check_native, "vllm": check_served}
KEPT = (
    "acceleration_rate", "standard_error", "overhead", "speedup", "tokens_per_second", "baseline_tokens_per_second",  # noqa: E501
    "accepted_per_position", "greedy_match", "tie_tolerance",
)  # fmt: skip


def check_on_served_model(
    request: CheckRequest, spec: TargetSpec, engine: str, progress: ProgressReporter | None = None
) -> dict[str, Any]:
    """One engine's figures of the heads on the copy.

    Returns:
        {"model", "format", "dtype", "figures": those of report.json that a copy has, "differing"}.
    """
    spec = replace(spec, max_tokens=request.target.max_tokens)
    if engine == "vllm":
        spec = in_vllm(spec, on_gpu=request.gpus > 0)
    plainly = request.settings.model_copy(
        update={"baselines": (), "assistant_model": None, "studies": ()}
    )
    found = CHECKS[engine](
        replace(request, target=spec, settings=plainly, assistant=None), progress
    )
    return {
        "model": spec.model,
        "format": format_of(model_config(spec)) or "not quantized",
        "dtype": spec.dtype,
        "figures": {name: found[engine][name] for name in KEPT if name in found[engine]},
        "differing": [{**each, "model": spec.model} for each in found["differing"]],
    }
