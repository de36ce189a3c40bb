"""Write quantized copies of a target, with the library of each format."""

from __future__ import annotations

import shutil

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def in_int8(source, directory):
    """Write a copy in compressed-tensors' int8 format; the lm_head is not quantized."""
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
    scheme = preset_name_to_scheme("W8A8", ["Linear"])
    settings = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status="initialized"
    )
    apply_quantization_config(model, settings)
    for layer in model.modules():
        if not getattr(layer, "quantization_scheme", None):
            continue
        rows = layer.weight.data[:, None]
        scale, zero = calculate_qparams(rows.amin(-1), rows.amax(-1), scheme.weights)
        layer.weight_scale.data.copy_(scale)
        if hasattr(layer, "weight_zero_point"):
            layer.weight_zero_point.data.copy_(zero)
        layer.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(directory)
    return directory


def in_4_bit(source, directory):
    """Write a copy in bitsandbytes' 4 bits (NF4)."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=settings, dtype=torch.float32
    )
    model.save_pretrained(directory)
    return directory
