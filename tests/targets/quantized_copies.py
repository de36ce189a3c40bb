"""Write quantized copies of a target, with the library of each format."""

from __future__ import annotations

import shutil

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

SCHEMES = {"int8": "W8A8", "fp8": "FP8_DYNAMIC", "packed": "W4A16"}  # compressed-tensors' own names
GROUP = 32  # weights that share a scale, of packed ones


def compressed(source, directory, name):
    """Write a copy in compressed-tensors' format; the lm_head is not quantized."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    shutil.copytree(source, directory, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(source)
    scheme = preset_name_to_scheme(SCHEMES[name], ["Linear"])
    if name == "packed":
        scheme.weights.group_size = GROUP
    settings = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status="initialized"
    )
    apply_quantization_config(model, settings)
    for layer in model.modules():
        if not getattr(layer, "quantization_scheme", None):
            continue
        weight = layer.weight.data
        groups = weight.unflatten(1, (-1, GROUP if name == "packed" else weight.shape[1]))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        layer.weight_scale.data.copy_(scale)
        if hasattr(layer, "weight_zero_point"):
            layer.weight_zero_point.data.copy_(zero)
        layer.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(directory)
    return directory


def by_bitsandbytes(source, directory, bits=8):
    """Write a copy in bitsandbytes' 8 or 4 bits (NF4)."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    settings = BitsAndBytesConfig(
        load_in_8bit=bits == 8,
        load_in_4bit=bits == 4,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=settings, dtype=torch.float32
    )
    model.save_pretrained(directory)
    return directory
