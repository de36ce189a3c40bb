"""Whether the engines that a run asks for can read its target, and the copy that will be served."""

from __future__ import annotations

import os

from pipeline.config import Config, FeaturesConfig, GenerateConfig
from pipeline.errors import ConfigError
from pipeline.run.placements import OF_ENGINE
from pipeline.run.served_copy import require_served_model
from pipeline.targets.files import is_local
from pipeline.targets.loading import require_readable
from pipeline.targets.spec import resolve


def check_quantization(config: Config) -> None:
    """Raise ConfigError where vLLM would load a target that is quantized on loading, which it
    cannot.
    """
    bits, writes = (
        config.target.quantization,
        config.generate.mode != "passthrough" or config.calibrate.data,
    )
    asked = {
        "generate.engine": writes and _in_vllm(config.generate),
        "features.engine": _in_vllm(config.features),
        "check.engines": "vllm" in config.check.engines,
    }
    if bits and (keys := [key for key, on_vllm in asked.items() if on_vllm]):
        instead = [
            f"{key}={'[native]' if key == 'check.engines' else 'transformers'}" for key in keys
        ]
        raise ConfigError(
            f"vLLM cannot load a target in {bits}, which is bitsandbytes', and is asked for:"
            f" {', '.join(keys)}.",
            f"target.quantization = {bits}",
            f"Set {' '.join(instead)}; or name a checkpoint that is quantized already (AWQ, GPTQ,"
            " FP8) as the target.",
        )


def _in_vllm(settings: GenerateConfig | FeaturesConfig) -> bool:
    """Whether vLLM loads the target as the configuration has it, and not as its own arguments
    say.
    """
    return settings.engine == "vllm" and "quantization" not in settings.engine_args


def check_readers(config: Config) -> None:
    """Refuse a quantized target, or a copy of it, that an engine cannot read here; a cluster's
    workers decide.
    """
    if os.environ.get("RAY_ADDRESS") or not (
        is_local(config.target.model) or config.check.served_model
    ):
        return
    target, on_gpu = (
        resolve(config.target),
        {part: _has_gpus(config, part) for part in OF_ENGINE.values()},
    )
    engines: list[tuple[str, str]] = [
        (config.generate.engine, "generate"),
        (config.features.engine, "features"),
    ]
    engines += [(engine, OF_ENGINE[engine]) for engine in config.check.engines]
    for engine, part in dict.fromkeys(engines):
        require_readable(target, engine, on_gpu=on_gpu[part], where="target.model")
    require_served_model(
        config, target, on_gpu={engine: on_gpu[part] for engine, part in OF_ENGINE.items()}
    )


def _has_gpus(config: Config, part: str) -> bool:
    """Whether the workers of a part have GPUs, of those that this machine has."""
    import torch

    return torch.cuda.is_available() and getattr(config.placement, part).gpus_per_worker != 0
