from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config

from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.targets import loading
from pipeline.targets.loading import (
    layer_outputs,
    lm_head_weight,
    load_causal_lm,
    require_gpus,
    verify_tap,
)
from pipeline.targets.spec import TargetSpec, weight_files
from tests.targets.conftest import edit, without
from tests.tiny_models import SIZES, tiny_model

WHOLE = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}


@pytest.fixture
def loads(monkeypatch):
    """A function that makes transformers return or raise its argument, and records the calls."""

    def replace(result):
        calls = []

        def from_pretrained(*_, **arguments):
            calls.append(arguments)
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
        return calls

    return replace


def test_a_target_is_loaded_frozen_in_its_dtype(random_target):
    model = load_causal_lm(TargetSpec(random_target.model, dtype="bfloat16"))
    assert not model.training
    assert {(p.requires_grad, p.dtype) for p in model.parameters()} == {(False, torch.bfloat16)}


def test_quantization_leaves_the_lm_head_alone(random_target):
    model = load_causal_lm(replace(random_target, quantization="4bit"))
    assert torch.equal(lm_head_weight(model), load_causal_lm(random_target).lm_head.weight)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8


# --- pickled weights


@pytest.fixture
def pickled(copied):
    """The random target with pickled weights, as older repositories store them."""
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    return copied


def test_pickled_weights_load_the_same_tensors(random_target, pickled):
    spec, expected = TargetSpec(str(pickled)), load_causal_lm(random_target).lm_head.weight
    assert torch.equal(lm_head_weight(load_causal_lm(spec)), expected)
    assert pickled / "pytorch_model.bin" in weight_files(spec)


def test_pickled_weights_run_no_code(pickled, tmp_path):
    class Touch:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"lm_head.weight": Touch()}, pickled / "pytorch_model.bin")
    with pytest.raises(ConfigError):
        load_causal_lm(TargetSpec(str(pickled)))
    assert not (tmp_path / "ran").exists()


# --- files that are not the model


def cut_in_half(directory):
    weights = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def resized(directory, **sizes):
    edit(directory / "config.json", **sizes)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_in_half, "transformers cannot load"),
        (partial(without, name="lm_head.weight"), "1 missing keys, lm_head.weight"),
        (partial(resized, num_hidden_layers=1), "unexpected keys, model.layers.1"),
    ],
)
def test_weights_are_never_filled_with_random_numbers(copied, damage, words):
    damage(copied)
    with pytest.raises(ConfigError, match=words) as caught:
        load_causal_lm(TargetSpec(str(copied)))
    assert "\n" not in str(caught.value)


def test_a_tied_matrix_is_no_damage(copied):
    resized(copied, tie_word_embeddings=True)
    without(copied, "lm_head.weight")
    model = load_causal_lm(TargetSpec(str(copied)))
    assert torch.equal(lm_head_weight(model), model.model.embed_tokens.weight)


def test_biases_that_a_quantizer_adds_are_no_damage(random_target, loads):
    """AutoGPTQ writes a bias of zeros for every layer, and transformers has no place for it."""
    model = load_causal_lm(random_target)
    loads((model, {**WHOLE, "unexpected_keys": {"model.layers.0.mlp.up_proj.bias"}}))
    with pytest.raises(ConfigError, match="unexpected"):
        load_causal_lm(random_target)
    model.hf_quantizer = object()
    assert load_causal_lm(random_target) is model


# --- the tap


def test_the_tap_is_what_lm_head_reads(random_target):
    model = load_causal_lm(random_target)
    verify_tap(model)
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    with pytest.raises(ConfigError, match="not what its lm_head reads"):
        verify_tap(model)
    model.model.embed_tokens.weight.fill_(float("inf"))
    with pytest.raises(ConfigError, match="not finite"):
        verify_tap(model)


@pytest.mark.parametrize("family", [LlamaConfig, Qwen3Config, Gemma3TextConfig])
def test_layer_outputs_are_the_hidden_states_of_transformers(family):
    model = tiny_model(family(**{**SIZES, "num_hidden_layers": 4, "head_dim": 16}))
    ids_BT = torch.randint(0, 40, (2, 7))
    with torch.no_grad(), layer_outputs(model, (1, 3, 4)) as seen:
        for _ in range(2):
            expected = model(input_ids=ids_BT, output_hidden_states=True).hidden_states
    assert len(seen) == 2
    for states_BTX in seen:
        first, third, last = states_BTX.chunk(3, -1)
        torch.testing.assert_close(first, expected[1], rtol=0, atol=0)
        torch.testing.assert_close(third, expected[3], rtol=0, atol=0)
        torch.testing.assert_close(model.base_model.norm(last), expected[4], rtol=0, atol=0)
        assert not torch.allclose(last, expected[4])
    model(input_ids=ids_BT)
    assert len(seen) == 2, "the hooks are gone"


def test_a_target_without_a_list_of_its_layers_has_no_layer_outputs():
    model = tiny_model(LlamaConfig(**SIZES))
    model.config.num_hidden_layers = 3
    with pytest.raises(ConfigError, match="not one list"), layer_outputs(model, (1,)):
        pass


def test_a_kernel_that_a_forward_lacks_is_an_environment_fault(random_target):
    model = load_causal_lm(random_target)
    model.lm_head.half()  # a product of float32 and float16
    with pytest.raises(EnvironmentFault):
        verify_tap(model)


# --- what a machine lacks


@pytest.mark.parametrize(
    ("error", "format", "expected"),
    [
        (ImportError("pip install bitsandbytes"), None, EnvironmentFault),
        (ValueError("FP8 is only supported on GPUs"), "fbgemm_fp8", EnvironmentFault),
        (ValueError("of the model's code"), None, ConfigError),
    ],
)
def test_errors_blame_the_machine_or_the_target(copied, loads, error, format, expected):
    if format:
        edit(copied / "config.json", quantization_config={"quant_method": format})
    loads(error)
    with pytest.raises(expected, match=str(error)):
        load_causal_lm(TargetSpec(str(copied)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the missing GPU")
def test_a_missing_gpu_is_an_environment_fault(random_target):
    require_gpus(0)
    with pytest.raises(EnvironmentFault, match="2 GPUs, and 0 are visible"):
        load_causal_lm(random_target, "cuda", num_gpus=2)


# --- GPUs, up to the call of transformers

FREE = {0: 900_000, 1: 800_000, 2: 700_000, 3: 600_000}  # bytes


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(loading, "require_gpus", lambda _: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (FREE[gpu], 10**9))
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.usefixtures("four_gpus")
def test_a_target_is_spread_over_the_first_gpus_alone(random_target, loads):
    """accelerate takes every visible device where `max_memory` is missing."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    calls = loads((load_causal_lm(random_target), WHOLE))
    for num_gpus in (1, 2):
        load_causal_lm(random_target, "cuda", num_gpus)
    placed = [(call["device_map"], call.get("max_memory")) for call in calls]
    assert placed == [({"": torch.device("cuda")}, None), ("auto", {0: 900_000, 1: 800_000})]
    # its plan for every new shape takes half a second
    assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.usefixtures("four_gpus")
def test_an_earlier_model_s_memory_is_budgeted_for_the_next(random_target, loads, monkeypatch):
    """torch keeps what is freed, and the driver counts it as taken, until the cache is emptied."""
    free = {0: 100, 1: 100}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free[gpu], 10**9))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.update(FREE))
    calls = loads((load_causal_lm(random_target), WHOLE))
    load_causal_lm(random_target, "cuda", num_gpus=2)
    assert calls[-1]["max_memory"] == {0: 900_000, 1: 800_000}


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("elsewhere", ["cpu", "memory"])
def test_a_target_that_overflows_its_gpus_is_refused(random_target, loads, elsewhere):
    model = load_causal_lm(random_target)
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers": elsewhere}
    loads(torch.cuda.OutOfMemoryError() if elsewhere == "memory" else (model, WHOLE))
    with pytest.raises(EnvironmentFault, match=r"does not fit.*2 GPU.*Raise gpus_per_worker"):
        load_causal_lm(random_target, "cuda", num_gpus=2)
