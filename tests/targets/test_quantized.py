"""A quantized target is read by transformers."""

from __future__ import annotations

import torch

from pipeline.run.estimate import target_sizes
from pipeline.targets.loading import load_causal_lm, verify_tap
from pipeline.targets.spec import TargetSpec, model_config, quantization_format
from tests.flows.tiny import resolved
from tests.targets.quantized_copies import in_4_bit

PROMPT = torch.tensor([[7, 20, 33, 41, 5, 90, 17]])


def test_a_quantized_copy_computes_nearly_what_the_target_does(tiny_target, make_config, tmp_path):
    spec = TargetSpec(str(in_4_bit(tiny_target, tmp_path)))
    assert quantization_format(model_config(spec)) == "bitsandbytes"
    config = make_config(tmp_path, target__model=spec.model)
    assert target_sizes(resolved(config)).stored_bits == 4
    model, full = load_causal_lm(spec), load_causal_lm(TargetSpec(str(tiny_target)))
    verify_tap(model)
    found, expected = model(PROMPT).logits, full(PROMPT).logits
    # quantized, and not random weights
    assert 0 < (found - expected).norm() / expected.norm() < 0.7
