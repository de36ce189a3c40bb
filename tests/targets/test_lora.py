from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
)

from pipeline.errors import ConfigError, DataError
from pipeline.targets.lora import add_lora, load_tuned, require_tunable
from pipeline.targets.spec import TargetSpec
from tests.targets.adapters import RANK, logits_with_adapter_on, save_adapter

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LLAMA = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
FAMILIES = {
    "llama": (LlamaConfig(**SIZES), LLAMA, 15),
    "qwen3": (Qwen3Config(**SIZES, head_dim=16), LLAMA, 15),
    "phi3": (
        Phi3Config(**SIZES),
        {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"},
        9,
    ),
    "gpt2": (
        GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1),
        {"c_attn", "c_proj", "c_fc", "lm_head"},
        9,
    ),
}


def saved(directory: Path, config: PretrainedConfig, **more: object) -> TargetSpec:
    """A target without weights: what is refused is refused before they are read."""
    config.save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return TargetSpec(str(directory))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_gets_an_adapter_and_the_model_says_what_it_said(family):
    config, names, number = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    ids = torch.arange(12)[None]
    before = model(input_ids=ids).logits
    tuned = add_lora(model, rank=4, alpha=8, dropout=0.1)
    assert torch.equal(tuned.eval()(input_ids=ids).logits, before)
    found = [
        re.search(r"(\w+)\.lora_A", name)[1]
        for name, _ in tuned.named_parameters()
        if "lora_A" in name
    ]
    assert set(found) == names and len(found) == number
    trained = {name: weight for name, weight in tuned.named_parameters() if weight.requires_grad}
    assert all(
        "lora_" in name and weight.dtype == torch.float32 for name, weight in trained.items()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_it_may_be_tuned(tmp_path, family):
    require_tunable(saved(tmp_path, FAMILIES[family][0]), rank=32, sharded=True)


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        (MixtralConfig(**SIZES, num_local_experts=2), {}, "LoRA does not find .*mlp.gate.* 5 more"),
        (Gemma2Config(**SIZES, head_dim=16), {}, "final_logit_softcapping"),
        (LlamaConfig(**SIZES), {"lm_head_multiplier": 0.5}, "lm_head_multiplier"),
        (
            LlamaConfig(**SIZES),
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "cannot be merged",
        ),
    ],
    ids=["experts", "softcap", "multiplier", "quantized"],
)
def test_it_is_refused_before_its_weights_are_read(tmp_path, config, more, said):
    with pytest.raises(ConfigError, match=said) as caught:
        require_tunable(saved(tmp_path, config, architectures=["AnyForCausalLM"], **more), rank=4)
    assert caught.value.fix and "\n" not in str(caught.value)


def test_a_rank_beyond_the_hidden_size_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"33.*hidden size, 32.*lora_rank"):
        require_tunable(saved(tmp_path, LlamaConfig(**SIZES)), rank=33)


IDS_BT = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def adapter(random_target: TargetSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(random_target.model, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def tied_target(tmp_path_factory: pytest.TempPathFactory) -> TargetSpec:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(
        **shape, num_attention_heads=2, tie_word_embeddings=True, initializer_range=0.2
    )
    directory = tmp_path_factory.mktemp("tied")
    LlamaForCausalLM(config).save_pretrained(directory)
    return TargetSpec(str(directory))


def test_merged_logits_are_those_of_the_adapter_beside_the_weights(random_target, adapter):
    expected = logits_with_adapter_on(random_target.model, adapter, IDS_BT)
    model = load_tuned(random_target, adapter)
    torch.testing.assert_close(model(input_ids=IDS_BT).logits, expected, atol=1e-4, rtol=1e-5)
    original = AutoModelForCausalLM.from_pretrained(random_target.model)(input_ids=IDS_BT).logits
    assert (original - expected).abs().max() > 0.5, "the adapter does something"
    assert (
        not any(parameter.requires_grad for parameter in model.parameters()) and not model.training
    )


@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_in_half_precision_each_weight_is_the_exact_sum_rounded_once(
    random_target, adapter, quantization
):
    merged = load_tuned(
        replace(random_target, dtype="bfloat16", quantization=quantization), adapter
    )
    before = load_file(Path(random_target.model) / "model.safetensors")
    lora = load_file(adapter / "adapter_model.safetensors")
    for name, weight in merged.state_dict().items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        expected = before[name].bfloat16()
        if (down := lora.get(f"{module}.lora_A.weight")) is not None:
            expected = (
                expected.double() + 2 * (lora[f"{module}.lora_B.weight"].double() @ down.double())
            ).float()
            assert down.shape[0] == RANK
        # fp32 sums of exact products differ from double ones by far less than half a step of
        # bfloat16
        assert (
            weight.float() - expected.bfloat16().float()
        ).abs().max() <= expected.abs().max() * 2**-8
        assert (weight == expected.bfloat16()).float().mean() > 0.999, name


def test_an_lm_head_that_was_tied_is_adapted_and_the_embedding_it_shared_is_not(
    tied_target, tmp_path
):
    adapter = save_adapter(tied_target.model, tmp_path / "adapter")
    expected = logits_with_adapter_on(tied_target.model, adapter, IDS_BT)
    model = load_tuned(tied_target, adapter)
    embedding = load_file(Path(tied_target.model) / "model.safetensors")[
        "model.embed_tokens.weight"
    ]
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert not torch.equal(model.get_output_embeddings().weight, embedding)
    model.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert again.config.tie_word_embeddings is False
    for each in (model, again):
        torch.testing.assert_close(each(input_ids=IDS_BT).logits, expected, atol=1e-4, rtol=1e-5)


def test_an_adapter_that_is_missing_or_of_another_target_is_named(
    random_target, tied_target, adapter, tmp_path
):
    with pytest.raises(DataError, match="no adapter of this target"):
        load_tuned(random_target, tmp_path)
    with pytest.raises(DataError, match="no adapter of this target"):
        load_tuned(tied_target, adapter)


def test_numbers_that_are_not_finite_never_become_a_backbone(random_target, adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "down_proj.lora_B" in name)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(DataError, match=r"down_proj.* is not finite"):
        load_tuned(random_target, tmp_path / "adapter")
