"""Quantized targets: transformers reads them, or they are refused before loading."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pipeline.run.estimate import target_sizes
from pipeline.targets.loading import load_causal_lm, verify_tap
from pipeline.targets.spec import (
    TargetSpec,
    model_config,
    quantization_format,
)
from tests.flows.tiny import resolved
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
    model, full = load_causal_lm(spec), load_causal_lm(TargetSpec(str(tiny_target)))
    verify_tap(model)
    found, expected = model(PROMPT).logits, full(PROMPT).logits
    # quantized, and not random weights
    assert 0 < (found - expected).norm() / expected.norm() < distance
