"""Quantized targets: transformers reads them, or they are refused before loading."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import PretrainedConfig

from pipeline.config import TargetConfig
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.run.estimate import target_sizes
from pipeline.targets.loading import load_causal_lm, require_readable, verify_tap
from pipeline.targets.spec import (
    TargetSpec,
    input_rounding,
    model_config,
    quantization_format,
    resolve,
)
from tests.flows.tiny import resolved
from tests.targets.conftest import edit
from tests.targets.quantized_copies import by_bitsandbytes, compressed

PROMPT = torch.tensor([[7, 20, 33, 41, 5, 90, 17]])
INT8, FP8, PACKED = (partial(compressed, name=name) for name in ("int8", "fp8", "packed"))
BNB4 = partial(by_bitsandbytes, bits=4)


@pytest.mark.parametrize(
    ("write", "described", "distance", "bits", "rounding"),
    [
        (INT8, "compressed-tensors (int-quantized)", 0.1, 8, "8bit"),
        (FP8, "compressed-tensors (float-quantized)", 0.3, 8, "8bit"),
        (PACKED, "compressed-tensors (pack-quantized)", 0.7, 4, None),  # rounds weights alone
        (by_bitsandbytes, "bitsandbytes (8 bits)", 0.1, 8, "8bit"),
        (BNB4, "bitsandbytes (4 bits)", 0.7, 4, "4bit"),
    ],
)
def test_a_quantized_copy_computes_nearly_what_the_target_does(
    tiny_target, make_config, tmp_path, write, described, distance, bits, rounding
):
    spec = TargetSpec(str(write(tiny_target, tmp_path)))
    assert quantization_format(model_config(spec)) == described
    assert resolve(TargetConfig(model=spec.model)).rounding == rounding
    config = make_config(tmp_path, target__model=spec.model)
    assert target_sizes(resolved(config)).stored_bits == bits
    require_readable(spec, "native", on_gpu=False, where="target.model")
    model, full = load_causal_lm(spec), load_causal_lm(TargetSpec(str(tiny_target)))
    verify_tap(model)
    found, expected = model(PROMPT).logits, full(PROMPT).logits
    # quantized, and not random weights
    assert 0 < (found - expected).norm() / expected.norm() < distance


@pytest.mark.parametrize(
    ("quantization", "engine", "error", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "vllm", ConfigError, "8 bits"),
        ({"quant_method": "fbgemm_fp8"}, "native", EnvironmentFault, "fbgemm_fp8.*GPU"),
        ({"quant_method": "ours"}, "native", EnvironmentFault, "ours"),
    ],
)
def test_an_unreadable_format_is_refused_with_the_reason(
    copied, quantization, engine, error, words
):
    edit(copied / "config.json", quantization_config=quantization)
    spec = TargetSpec(str(copied))
    with pytest.raises(error, match=words) as caught:
        require_readable(spec, engine, on_gpu=False, where="check.served_model")
    assert caught.value.where == "check.served_model" and "\n" not in str(caught.value)


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize(
    ("settings", "rounding"),
    [
        (BNB | {"bnb_4bit_compute_dtype": "bfloat16"}, "8bit"),
        (BNB | {"bnb_4bit_compute_dtype": "float32"}, "4bit"),
        (BNB, "4bit"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "8bit"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "8bit"),
        ({"quant_method": "gptq", "bits": 4}, None),
    ],
)
def test_rounding_of_inputs_follows_from_the_settings(settings, rounding):
    assert input_rounding(PretrainedConfig(quantization_config=settings)) == rounding
