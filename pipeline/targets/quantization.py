"""What a checkpoint's config.json says of its quantization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Rounding = Literal["4bit", "8bit"]

ROUND_WHAT_THEY_READ = ("fbgemm_fp8", "modelopt")  # without a word of it in their settings


def quantization_of(config: PretrainedConfig) -> dict[str, Any] | None:
    """The quantization of a checkpoint as its config.json has it; None where it is not
    quantized.
    """
    found = getattr(config, "quantization_config", None)
    if found is None or isinstance(found, dict):
        return found
    return dict(found.to_dict())


def format_of(config: PretrainedConfig) -> str | None:
    """The format in words, as `compressed-tensors (int-quantized)` or `gptq (4 bits)`; None where
    there is none.
    """
    settings = quantization_of(config)
    if settings is None:
        return None
    bits = settings.get("bits") or next(
        (n for n in (4, 8) if settings.get(f"load_in_{n}bit")), None
    )
    more = settings.get("format") or (f"{bits} bits" if bits else "")
    method = str(settings.get("quant_method", "an unknown format"))
    return f"{method} ({more})" if more else method


def rounding_of(config: PretrainedConfig) -> Rounding | None:
    """How its layers round what they read, as bitsandbytes' do; None where they round their weights
    alone.

    Those of "8bit" round it to 8 bits, wherever they run; bitsandbytes' 4-bit ones do where their
    checkpoint says that they multiply in bfloat16. Others of "4bit" do so on a CPU; a GPU
    multiplies them in the states' own dtype.
    """
    settings = quantization_of(config) or {}
    groups = (settings.get("config_groups") or {}).values()
    of_groups = any(isinstance(group, dict) and group.get("input_activations") for group in groups)
    if of_groups or settings.get("load_in_8bit") or settings.get("activation_scheme"):
        return "8bit"
    if settings.get("quant_method") in ROUND_WHAT_THEY_READ:
        return "8bit"
    if settings.get("load_in_4bit"):
        return (
            "8bit" if str(settings.get("bnb_4bit_compute_dtype")).endswith("bfloat16") else "4bit"
        )
    return None
