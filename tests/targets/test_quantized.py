"""Quantized targets: transformers reads them, or they are refused before loading."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.run.estimate import target_sizes
from pipeline.targets.loading import load_causal_lm, require_readable, verify_tap
from pipeline.targets.spec import (
    TargetSpec,
    model_config,
    quantization_format,
)
from tests.flows.tiny import resolved
from tests.targets.conftest import edit
from tests.targets.quantized_copies import by_bitsandbytes, compressed

PROMPT = torch.tensor([[7, 20, 33, 41, 5, 90, 17]])
FP8, PACKED = (partial(compressed, name=name) for name in ("fp8", "packed"))
BNB4 = partial(by_bitsandbytes, bits=4)


@pytest.mark.parametrize(
    ("write", "described", "distance", "bits"),
    [
        (FP8, "compressed-tensors (float-quantized)", 0.3, 8),
        (PACKED, "compressed-tensors (pack-quantized)", 0.7, 4),
        (BNB4, "bitsandbytes", 0.7, 4),
    ],
)
def test_a_quantized_copy_computes_nearly_what_the_target_does(
    tiny_target, make_config, tmp_path, write, described, distance, bits
):
    spec = TargetSpec(str(write(tiny_target, tmp_path)))
    assert quantization_format(model_config(spec)) == described
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
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            "vllm",
            ConfigError,
            "bitsandbytes",
        ),
        ({"quant_method": "fbgemm_fp8"}, "native", EnvironmentFault, "fbgemm_fp8.*GPU"),
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
