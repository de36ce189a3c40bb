"""Targets that are quantized on disk: what transformers reads, and what is refused before anything
is loaded.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from pipeline.config import TargetConfig
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.run.estimate import target_sizes
from pipeline.targets.loading import load_causal_lm, require_readable, verify_tap
from pipeline.targets.spec import TargetSpec, format_of, model_config, resolve, rounding_of
from pipeline.targets.vllm_engine import engine_arguments, in_vllm
from tests.targets.quantized_copies import by_bitsandbytes, compressed, finegrained_fp8

PROMPT = torch.tensor([[7, 20, 33, 41, 5, 90, 17]])
FORMATS = {
    "int8": (partial(compressed, name="int8"), "compressed-tensors (int-quantized)", 0.1),
    "fp8": (partial(compressed, name="fp8"), "compressed-tensors (float-quantized)", 0.3),
    "packed": (partial(compressed, name="packed"), "compressed-tensors (pack-quantized)", 0.7),
    "bitsandbytes": (by_bitsandbytes, "bitsandbytes (8 bits)", 0.1),
    "bitsandbytes, 4 bits": (partial(by_bitsandbytes, bits=4), "bitsandbytes (4 bits)", 0.7),
    "finegrained fp8": (finegrained_fp8, "fp8", 0.3),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_copy_that_its_own_library_wrote_computes_nearly_what_the_target_does(
    tiny_target, make_config, tmp_path, name
):
    write, described, distance = FORMATS[name]
    spec = TargetSpec(str(write(tiny_target, tmp_path)))
    assert format_of(model_config(spec)) == described
    rounding = {"packed": None, "bitsandbytes, 4 bits": "4bit"}.get(
        name, "8bit"
    )  # of packed ones weights alone
    assert resolve(TargetConfig(model=spec.model)).rounding == rounding
    sizes = target_sizes(make_config(tmp_path, target__model=spec.model))
    assert sizes and sizes.stored_bits == (4 if name in ("packed", "bitsandbytes, 4 bits") else 8)
    require_readable(spec, "native", on_gpu=False, where="target.model")
    model, full = load_causal_lm(spec), load_causal_lm(TargetSpec(str(tiny_target)))
    verify_tap(model)
    found, expected = model(PROMPT).logits, full(PROMPT).logits
    assert 0 < (found - expected).norm() / expected.norm() < distance, (
        "quantized, and not random weights"
    )


@pytest.fixture
def claims(tiny_target, tmp_path):
    """A target whose config.json says that it is quantized in some way."""

    def write(**quantization: object) -> TargetSpec:
        config = json.loads((tiny_target / "config.json").read_text())
        Path(tmp_path, "config.json").write_text(
            json.dumps(config | {"quantization_config": quantization})
        )
        return TargetSpec(str(tmp_path))

    return write


@pytest.mark.parametrize(
    ("quantization", "engine", "error", "says"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            "vllm",
            ConfigError,
            r"no bitsandbytes.*\(8 bits\)",
        ),
        ({"quant_method": "fbgemm_fp8"}, "native", EnvironmentFault, "fbgemm_fp8.*GPU"),
        (
            {"quant_method": "of our own"},
            "native",
            EnvironmentFault,
            "of our own.*[Uu]nknown quantization",
        ),
    ],
)
def test_a_format_that_cannot_be_read_here_is_refused_with_the_reason(
    claims, quantization, engine, error, says
):
    with pytest.raises(error, match=says) as caught:
        require_readable(claims(**quantization), engine, on_gpu=False, where="check.served_model")
    assert caught.value.where == "check.served_model" and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "quantization", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "bits": 4}]
)
def test_a_reader_that_is_not_installed_is_named(claims, monkeypatch, quantization):
    def lacking(*_, **__):
        raise ImportError("Loading it requires gptqmodel (`pip install gptqmodel`)")

    monkeypatch.setattr("transformers.quantizers.AutoHfQuantizer.from_config", lacking)
    spec = claims(**quantization)
    with pytest.raises(EnvironmentFault, match=r"\(4 bits\).*gptqmodel.*HEADS --engine vllm"):
        require_readable(spec, "native", on_gpu=False, where="target.model")
    require_readable(spec, "vllm", on_gpu=False, where="target.model")
    assert in_vllm(spec, on_gpu=False).dtype == "bfloat16"
    assert in_vllm(spec, on_gpu=True) == spec


def test_vllm_is_started_in_a_dtype_that_the_copy_s_kernels_have(claims):
    """Whatever it is started for: generation, features, the check, its steps' times, the server."""
    assert engine_arguments(claims(quant_method="gptq", bits=4), {}, 0)["dtype"] == "bfloat16"
    assert (
        engine_arguments(claims(quant_method="compressed-tensors", format="int-quantized"), {}, 0)[
            "dtype"
        ]
        == "float32"
    )


@pytest.mark.parametrize(
    ("settings", "rounding"),
    [
        (
            {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_compute_dtype": "bfloat16",
            },
            "8bit",
        ),
        (
            {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_compute_dtype": "float32",
            },
            "4bit",
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "4bit"),
        ({"quant_method": "fbgemm_fp8"}, "8bit"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "8bit"),
        ({"quant_method": "gptq", "bits": 4}, None),
    ],
)
def test_layers_that_multiply_in_fewer_bits_than_the_target_s_are_told_by_their_settings(
    settings, rounding
):
    assert rounding_of(PretrainedConfig(quantization_config=settings)) == rounding
