"""The arguments of vLLM, tested without vLLM."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.targets import vllm_engine
from pipeline.targets.spec import model_config
from pipeline.targets.vllm_engine import (
    VLLMGenerationEngine,
    engine_arguments,
    serving_arguments,
)
from tests.targets.conftest import CONTEXT


def test_a_missing_vllm_is_an_environment_fault(random_target, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EnvironmentFault, match=r"not importable.*generate\.engine"):
        VLLMGenerationEngine(random_target, {})


def test_a_quantization_of_transformers_is_refused(random_target):
    with pytest.raises(ConfigError, match=r"generate\.engine"):
        VLLMGenerationEngine(replace(random_target, quantization="4bit"), {})


def test_prompts_are_prefilled_whole_on_a_cpu(random_target):
    arguments = engine_arguments(random_target, {"enforce_eager": False}, gpus=0)
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] >= arguments["max_model_len"] == CONTEXT
    assert arguments["enforce_eager"] is False, "the user's arguments override ours"


def test_a_server_on_a_cpu_has_room_for_two_texts(random_target, monkeypatch):
    """A token's keys and values: 2 of each layer's heads, in 4 bytes."""
    found = serving_arguments(random_target, {"model": "export"}, gpus=0)
    assert (found["model"], found["served_model_name"]) == (
        "export",
        Path(random_target.model).name,
    )
    assert (found["max_model_len"], found["kv_cache_memory_bytes"]) == (CONTEXT, 1 << 30)
    config = model_config(random_target)
    width = config.head_dim * config.num_key_value_heads
    of_token = 2 * config.num_hidden_layers * width * 4
    monkeypatch.setattr(vllm_engine, "CPU_KV_CACHE_BYTES", 20 * of_token)
    assert serving_arguments(random_target, {}, gpus=0)["max_model_len"] == 10


def test_a_server_on_gpus_leaves_memory_to_vllm(random_target):
    found = serving_arguments(random_target, {}, gpus=2)
    assert found["tensor_parallel_size"] == 2 and "max_model_len" not in found
