"""Protocols and constructors of generation and feature engines (vLLM, transformers).

Engines take token ids and return token ids or states. No engine tokenizes, detokenizes or adds
special tokens. The two protocols are separate because their engines are loaded at different times
and use memory differently. An implementation's module is imported only when an engine is
constructed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pipeline.errors import ConfigError
from pipeline.targets.spec import EngineArgs, TargetSpec

if TYPE_CHECKING:
    import torch

    from pipeline.conversations.requests import Completion, Request

EngineName = Literal["vllm", "transformers"]


# Engine arguments that limit resources and not results: a run that ran out of memory resumes with
# smaller ones.
PLACEMENT_ARGUMENTS = {
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_batch_tokens",
    "max_num_batched_tokens",
    "max_num_seqs",
    "swap_space",
    "tensor_parallel_size",
}


class GenerationEngine(Protocol):
    """An engine that generates text with the target.

    Requests may be added at any time, so that the next turn of a conversation can follow at once.

    A text ends with a token of the target's EOS ids or of the request's `stop_token_ids`, which is
    part of the text (finish "stop"), or at `max_new_tokens` or the end of the context ("length").
    """

    capacity: int  # concurrent requests; more are queued

    def add(self, request: Request) -> None:
        """Queue a request with a new id for the generation engine.

        The prompt is not empty and is shorter than the context.
        """

    def step(self) -> list[Completion]:
        """Run one step of the generation engine; return the texts that it finishes, perhaps none.

        A step need not add a token to every running request.
        """

    def close(self) -> None:
        """Release the memory of the engine's target; the engine cannot be used again."""


class FeatureEngine(Protocol):
    """An engine that computes the target's last hidden states, after the final norm."""

    hidden_size: int
    dtype: torch.dtype

    def stream(
        self, rows: Iterable[Sequence[int]]
    ) -> Generator[tuple[int, torch.Tensor], None, None]:
        """Yield each row's index and the target's states [T_i, D], on the host and in any order.

        Later rows are computed while the caller works. A tensor may be a view of a shared buffer,
        so copy a tensor to keep it. Exhaust or close a generator before the next call, because its
        rows may stay in the engine until then.
        """

    def close(self) -> None:
        """Release the memory of the engine's target; the engine cannot be used again."""


def semantic_arguments(engine_args: EngineArgs) -> dict[str, Any]:
    """Return the arguments of a vLLM or transformers engine that can change its results."""
    return {name: value for name, value in engine_args.items() if name not in PLACEMENT_ARGUMENTS}


def make_generation_engine(
    name: EngineName,
    target: TargetSpec,
    engine_args: EngineArgs,
    gpus: int,
    batch_invariant: bool = False,
) -> GenerationEngine:
    """Load the target into a vLLM or transformers generation engine.

    `batch_invariant` is only for vLLM; transformers ignores it.

    Raises:
        ConfigError, EnvironmentFault: As the engine's class does, and for an unknown argument.
    """
    if name == "vllm":
        from pipeline.targets.vllm_engine import VLLMGenerationEngine

        return VLLMGenerationEngine(target, engine_args, gpus=gpus, batch_invariant=batch_invariant)
    from pipeline.targets.transformers_engines import TransformersGenerationEngine

    _refuse_unknown(engine_args, {"max_batch_tokens"})
    return TransformersGenerationEngine(target, gpus=gpus, **engine_args)


def make_feature_engine(
    name: EngineName,
    target: TargetSpec,
    tokens_per_batch: int,
    engine_args: EngineArgs,
    gpus: int,
) -> FeatureEngine:
    """Load the target into a vLLM or transformers feature engine.

    Raises:
        ConfigError, EnvironmentFault: As the engine's class does, and for an unknown argument.
    """
    if name == "vllm":
        from pipeline.targets.vllm_engine import VLLMFeatureEngine

        return VLLMFeatureEngine(target, engine_args, gpus=gpus, tokens_per_batch=tokens_per_batch)
    from pipeline.targets.transformers_engines import TransformersFeatureEngine

    _refuse_unknown(engine_args, set())
    return TransformersFeatureEngine(target, tokens_per_batch=tokens_per_batch, gpus=gpus)


def _refuse_unknown(engine_args: EngineArgs, known: set[str]) -> None:
    """Raise ConfigError for an argument that the transformers engine does not have."""
    for name in engine_args.keys() - known:
        fix = "Generation takes max_batch_tokens, features take none."
        raise ConfigError(f"The transformers engine has no argument {name}.", "engine_args", fix)
