"""Whether this machine and an engine can read a target whose files are quantized.

transformers says itself what a format needs (`validate_environment`): a package, a GPU. vLLM's
answers are written down here, as of 0.32, since asking it would import it: it has no bitsandbytes.
Without a GPU both decompress compressed-tensors (int8 and fp8); packed 4-bit weights and
`quant_method: fp8` multiply in vLLM in 16 bits alone, the latter, in blocks, on CPUs with AMX. On a
GPU without 8-bit floats (compute capability below 8.9) vLLM keeps FP8 weights and multiplies in 16
bits (its Marlin kernels, from 7.5 on), and transformers expands them to bfloat16. vLLM refuses a
GPU that is too old for a format when it starts.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.targets.quantization import format_of, quantization_of
from pipeline.targets.spec import TargetSpec, first_lines, model_config

NOT_IN_VLLM = {"bitsandbytes": "vLLM 0.32 has no bitsandbytes"}
# gptqmodel 7.7 asks for torch 2.14 and transformers 5.20, which vLLM 0.32 excludes; older ones ask
# for numpy 2.2.6 and import torchvision, whose ordinary build fails beside a CPU torch. So neither
# it nor optimum is in the lock files.
VLLM_ALONE = ("gptq", "awq")
SIXTEEN_BITS = (*VLLM_ALONE, "fp8")


def require_readable(spec: TargetSpec, engine: str, *, on_gpu: bool, where: str) -> None:
    """Refuse a quantized target that the engine cannot read on this machine, before anything is
    loaded.

    Args:
        engine: native (or transformers), or vllm.
        where: The key that names the target.

    Raises:
        ConfigError: The engine has no reader of the format.
        EnvironmentFault: It needs a package or a GPU that is not here.
    """
    config = model_config(spec)
    settings = quantization_of(config)
    if settings is None:
        return
    if engine == "vllm":
        if reason := NOT_IN_VLLM.get(str(settings.get("quant_method"))):
            fix = (
                "Name another copy, or decode natively: check.engines: [native], engine:"
                " transformers."
            )
            raise ConfigError(f"{reason}, and {spec.model} is {format_of(config)}.", where, fix)
        if (
            settings.get("quant_method") == "fp8"
            and settings.get("weight_block_size")
            and not on_gpu
        ):
            _require_amx(spec, where)
        return
    from transformers.quantizers import AutoHfQuantizer

    try:
        quantizer = AutoHfQuantizer.from_config(dict(settings), pre_quantized=True)
        quantizer.validate_environment(device_map={"": 0 if on_gpu else "cpu"}, weights_only=True)
    except Exception as error:  # each format has errors of its own
        if settings.get("quant_method") in VLLM_ALONE:
            fix = (
                "Its packages are not in the lock files, since they do not go with vLLM's torch:"
                " leave it to vLLM (check.engines: [vllm], engine: vllm; `check HEADS --engine"
                " vllm`), or name a compressed-tensors copy."
            )
        else:
            fix = (
                "Install what it names, run where a GPU is, or leave this to vLLM: check.engines:"
                " [vllm], engine: vllm."
            )
        what = (
            f"{spec.model} is {format_of(config)}, which transformers cannot read here:"
            f" {first_lines(error)}."
        )
        raise EnvironmentFault(what, where, fix) from error


def _require_amx(spec: TargetSpec, where: str) -> None:
    import torch

    if not torch.cpu._is_amx_tile_supported():
        what = (
            f"{spec.model} is fp8 in blocks, which vLLM multiplies on a CPU with AMX alone, and"
            " this one has none."
        )
        raise EnvironmentFault(
            what, where, "Decode natively, check.engines: [native], or run where a GPU is."
        )


def in_engine(spec: TargetSpec, engine: str, *, on_gpu: bool) -> TargetSpec:
    """The spec in a dtype that the engine multiplies in: packed weights and fp8 have no float32 in
    vLLM on a CPU.
    """
    settings = quantization_of(model_config(spec)) or {}
    packed = (
        settings.get("format") == "pack-quantized" or settings.get("quant_method") in SIXTEEN_BITS
    )
    return replace(spec, dtype="bfloat16") if packed and engine == "vllm" and not on_gpu else spec
