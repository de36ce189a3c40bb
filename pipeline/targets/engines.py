"""The classes of `engine: vllm` and `engine: transformers`, each imported when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pipeline.errors import ConfigError
from pipeline.targets.protocol import FeatureEngine, GenerationEngine
from pipeline.targets.spec import TargetSpec

EngineName = Literal["vllm", "transformers"]


# Engine arguments that limit resources and not results: a run that ran out of memory resumes with smaller ones.
PLACEMENT_ARGUMENTS = {
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_batch_tokens",
    "max_num_batched_tokens",
    "max_num_seqs",
    "swap_space",
    "tensor_parallel_size",
}


def semantic_arguments(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """The engine arguments that are part of a fingerprint."""
    return {name: value for name, value in engine_args.items() if name not in PLACEMENT_ARGUMENTS}


def make_generation_engine(
    name: EngineName, target: TargetSpec, engine_args: Mapping[str, Any], gpus: int, batch_invariant: bool = False
) -> GenerationEngine:
    """The generation engine; raises what its class raises."""
    if name == "vllm":
        from pipeline.targets.vllm_engine import VLLMGenerationEngine

        return VLLMGenerationEngine(target, engine_args=engine_args, gpus=gpus, batch_invariant=batch_invariant)
    from pipeline.targets.transformers_generation import TransformersGenerationEngine

    return TransformersGenerationEngine(
        target, gpus=gpus, **_known(engine_args, "generate.engine_args", {"max_batch_tokens"})
    )


def make_feature_engine(
    name: EngineName, target: TargetSpec, tokens_per_batch: int, engine_args: Mapping[str, Any], gpus: int
) -> FeatureEngine:
    """The feature engine; raises what its class raises."""
    if name == "vllm":
        from pipeline.targets.vllm_features import VLLMFeatureEngine

        return VLLMFeatureEngine(target, engine_args=engine_args, gpus=gpus, tokens_per_batch=tokens_per_batch)
    from pipeline.targets.transformers_features import TransformersFeatureEngine

    _known(engine_args, "features.engine_args", set())
    return TransformersFeatureEngine(target, tokens_per_batch=tokens_per_batch, gpus=gpus)


def _known(engine_args: Mapping[str, Any], where: str, known: set[str]) -> Mapping[str, Any]:
    if unknown := sorted(set(engine_args) - known):
        takes = f"It takes {', '.join(sorted(known))}." if known else "It takes none."
        raise ConfigError(f"The transformers engine has no argument {', '.join(unknown)}.", where, takes)
    return engine_args
