"""Protocols and constructors of generation and feature engines (vLLM, transformers).

Engines take token ids and return token ids or states. No engine tokenizes, detokenizes or adds
special tokens. An implementation's module is imported only when an engine is constructed.
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


# Engine arguments that change the use of resources and not the results: a run that ran out of
# memory can resume with other values.
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

    Requests may be added before any step.

    A text ends with a token of the target's EOS ids or of the request's `stop_token_ids`, which is
    part of the text (finish "stop"), or at `max_new_tokens` or the end of the context ("length").
    """

    capacity: int  # concurrent requests; further ones are queued

    def add(self, request: Request) -> None:
        """Queue a request.

        Its id must differ from the ids of all unfinished requests. Its prompt must not be empty and
        must be shorter than the context.
        """

    def step(self) -> list[Completion]:
        """Run one step of the engine; return the texts that it finishes, perhaps none.

        A step need not add a token to every running request.
        """

    def lengths(self) -> dict[str, int]:
        """Return the number of tokens so far of each running text, by request id."""

    def close(self) -> None:
        """Release the memory of the engine's target; the engine cannot be used again."""


class FeatureEngine(Protocol):
    """An engine that computes states of the target.

    They are the last hidden states, after the final norm, or the outputs of some layers.
    """

    hidden_size: int
    dtype: torch.dtype

    def stream(
        self, rows: Iterable[Sequence[int]]
    ) -> Generator[tuple[int, torch.Tensor], None, None]:
        """Yield the index and the states [T_i, X] of each row of token ids, in any order.

        X is the hidden size times the number of layers. The states are on the CPU. Later rows are
        computed while the caller works. A tensor may be a view of a shared buffer, so copy a tensor
        to keep it. Exhaust or close the generator before the next call, because its rows may stay
        in the engine until then.
        """

    def close(self) -> None:
        """Release the memory of the engine's target; the engine cannot be used again."""


def semantic_arguments(engine_args: EngineArgs) -> dict[str, Any]:
    """Return the engine arguments that can change results: all but `PLACEMENT_ARGUMENTS`."""
    return {name: value for name, value in engine_args.items() if name not in PLACEMENT_ARGUMENTS}


def make_generation_engine(
    name: EngineName,
    target: TargetSpec,
    engine_args: EngineArgs,
    gpus: int,
) -> GenerationEngine:
    """Load the target into a new generation engine.

    Args:
        name: The kind of engine.
        engine_args: Arguments of `vllm.LLM` or of `TransformersGenerationEngine`.
        gpus: The number of GPUs that the engine uses; 0 means the CPU.

    Raises:
        ConfigError: `engine_args` has an unknown argument, or the engine's class raises it.
        EnvironmentFault: The engine's class raises it.
    """
    if name == "vllm":
        from pipeline.targets.vllm_engine import VLLMGenerationEngine

        return VLLMGenerationEngine(target, engine_args, gpus=gpus)
    from pipeline.targets.transformers_engines import TransformersGenerationEngine

    _refuse_unknown(engine_args, {"max_batch_tokens"})
    return TransformersGenerationEngine(target, gpus=gpus, **engine_args)


def make_feature_engine(
    name: EngineName,
    target: TargetSpec,
    tokens_per_batch: int,
    engine_args: EngineArgs,
    gpus: int,
    layers: tuple[int, ...] = (),
) -> FeatureEngine:
    """Load the target into a new feature engine.

    Args:
        name: The kind of engine.
        tokens_per_batch: Maximum tokens of one forward pass; see the engine's class.
        engine_args: Arguments of `vllm.LLM`; empty for transformers.
        gpus: The number of GPUs that the engine uses; 0 means the CPU.
        layers: The layers whose outputs to compute, ascending; empty for the last states.

    Raises:
        ConfigError: `engine_args` has an unknown argument, or the engine's class raises it.
        EnvironmentFault: The engine's class raises it.
    """
    if name == "vllm":
        from pipeline.targets.vllm_engine import VLLMFeatureEngine

        return VLLMFeatureEngine(
            target, engine_args, gpus=gpus, tokens_per_batch=tokens_per_batch, layers=layers
        )
    from pipeline.targets.transformers_engines import TransformersFeatureEngine

    _refuse_unknown(engine_args, set())
    return TransformersFeatureEngine(
        target, tokens_per_batch=tokens_per_batch, layers=layers, gpus=gpus
    )


def _refuse_unknown(engine_args: EngineArgs, known: set[str]) -> None:
    """Raise ConfigError if an argument of the transformers engine is not in `known`."""
    for name in engine_args.keys() - known:
        raise ConfigError(
            f"The transformers engine has no argument {name}.",
            "engine_args",
            "Generation takes max_batch_tokens, features take none.",
        )
