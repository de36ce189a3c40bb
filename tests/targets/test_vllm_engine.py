"""The arguments of vLLM, tested without vLLM."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.targets.spec import TargetSpec
from pipeline.targets.vllm_engine import VLLMGenerationEngine, engine_arguments
from tests.targets.conftest import CONTEXT, edit


def test_a_missing_vllm_is_an_environment_fault(random_target, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EnvironmentFault, match=r"not importable.*engine: transformers"):
        VLLMGenerationEngine(random_target, {})


def test_a_quantization_of_transformers_is_refused(random_target):
    with pytest.raises(ConfigError, match="engine: transformers"):
        VLLMGenerationEngine(replace(random_target, quantization="4bit"), {})


def test_prompts_are_prefilled_whole_on_a_cpu(random_target):
    arguments = engine_arguments(random_target, {"enforce_eager": False}, gpus=0)
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] >= arguments["max_model_len"] == CONTEXT
    assert arguments["enforce_eager"] is False, "the user's arguments override ours"


@pytest.mark.parametrize(
    ("settings", "on_cpu"),
    [
        ({"quant_method": "gptq", "bits": 4}, "bfloat16"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "bfloat16"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "float32"),
    ],
)
def test_packed_weights_run_in_16_bits_on_a_cpu(copied, settings, on_cpu):
    edit(copied / "config.json", quantization_config=settings)
    spec = TargetSpec(str(copied))
    assert engine_arguments(spec, {}, gpus=0)["dtype"] == on_cpu
    assert engine_arguments(spec, {}, gpus=1)["dtype"] == "float32"
