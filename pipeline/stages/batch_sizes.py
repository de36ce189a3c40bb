"""The batches that pay in vLLM, for a run's target on a GPU, by arithmetic."""

from __future__ import annotations

from pipeline.artifacts.check_result import BatchLimits
from pipeline.evaluation.batch_limits import (
    gpu_figures,
    memory_bound_tokens,
    sequences_in_memory,
)
from pipeline.run.estimate import CACHED_TOKENS, planned_gpu_memory, target_sizes
from pipeline.run.resolved import ResolvedRun
from pipeline.targets.spec import cached_numbers


def batch_limits(run: ResolvedRun, gpu: str | None) -> BatchLimits | None:
    """Return the limits of a batch that decodes with the run's target.

    A sequence has `CACHED_TOKENS` tokens, or the target's context if that is shorter. Its GPUs are
    as many as those of the generate stage.

    Args:
        gpu: The GPU's name as torch states it; None for a GPU that the settings describe.

    Returns:
        None if the GPU's peak figures, its memory or the target's size are unknown.
    """
    target = target_sizes(run)
    if target is None:
        return None
    peak = gpu_figures(run.config.placement, gpu, target)
    memory = planned_gpu_memory(run)
    if peak is None or memory is None:
        return None
    weights = target.weight_bytes(run.config.target.quantization)
    num_gpus = max(1, run.gpus_of("generate"))
    context = min(CACHED_TOKENS, run.context)
    cached = context * cached_numbers(run.target_config) * target.itemsize
    return BatchLimits(
        tflops=peak.tflops,
        bandwidth_gbs=peak.bandwidth_gbs,
        memory_bound_tokens=memory_bound_tokens(peak, weights / target.parameters),
        gpus=num_gpus,
        sequences=sequences_in_memory(num_gpus * memory, weights, cached),
        sequence_tokens=context,
    )
