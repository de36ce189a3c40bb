from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
)

from pipeline.errors import ConfigError, DataError
from pipeline.targets.lora import add_lora, load_tuned, require_tunable
from pipeline.targets.spec import TargetSpec
from tests.targets.adapters import logits_with_adapter_on, save_adapter
from tests.targets.conftest import edit
from tests.tiny_models import SIZES, tiny_llama, tiny_model

IDS_BT = torch.arange(24).view(2, 12)
LLAMA = LlamaConfig(**SIZES)


def test_every_linear_layer_is_adapted_and_the_model_unchanged(tmp_path):
    config = Phi3Config(**SIZES)
    names = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"}
    model = tiny_model(config).requires_grad_(False)
    before = model(input_ids=IDS_BT).logits
    tuned = add_lora(model, rank=4, alpha=8, dropout=0.1)
    assert torch.equal(tuned.eval()(input_ids=IDS_BT).logits, before)
    trained = [(name, weight) for name, weight in tuned.named_parameters() if weight.requires_grad]
    assert all("lora_" in name and weight.dtype == torch.float32 for name, weight in trained)
    adapted = [name.split(".")[-4] for name, _ in trained if "lora_A" in name]
    assert set(adapted) == names and len(adapted) == 9
    layers = [layer for layer in tuned.modules() if hasattr(layer, "lora_A")]
    assert {layer.scaling["default"] for layer in layers} == {8 / 4}
    config.save_pretrained(tmp_path)
    require_tunable(TargetSpec(str(tmp_path)), sharded=True)


QUANTIZED = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
SOFTCAPPED = Gemma2Config(**SIZES, head_dim=16)


@pytest.mark.parametrize(
    ("config", "more", "words"),
    [
        (MixtralConfig(**SIZES, num_local_experts=2), {}, "mlp.gate"),
        (SOFTCAPPED, {}, "final_logit_softcapping"),
        (LLAMA, {"lm_head_multiplier": 0.5}, "lm_head_multiplier"),
        (LLAMA, QUANTIZED, "quantized"),
    ],
)
def test_a_target_is_refused_before_its_weights_are_read(tmp_path, config, more, words):
    config.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", architectures=["AnyForCausalLM"], **more)
    with pytest.raises(ConfigError, match=words):
        require_tunable(TargetSpec(str(tmp_path)))


# --- merging


@pytest.fixture(scope="module")
def adapter(random_target, tmp_path_factory):
    return save_adapter(random_target.model, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def tied_target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tied")
    tiny_llama(tie_word_embeddings=True, initializer_range=0.2).save_pretrained(directory)
    return TargetSpec(str(directory))


ADAPTED = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head")


@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_a_merged_weight_is_the_exact_sum_rounded_once(random_target, adapter, quantization):
    spec = replace(random_target, dtype="bfloat16", quantization=quantization)
    before = load_file(Path(random_target.model) / "model.safetensors")
    lora = load_file(adapter / "adapter_model.safetensors")
    merged = load_tuned(spec, adapter).state_dict()
    for module in ADAPTED:
        lora_A = lora[f"base_model.model.{module}.lora_A.weight"].double()
        lora_B = lora[f"base_model.model.{module}.lora_B.weight"].double()
        original = before[f"{module}.weight"].bfloat16().double()
        expected, found = (original + 2 * lora_B @ lora_A).bfloat16(), merged[f"{module}.weight"]
        # fp32 sums of exact products differ from double ones by far less than half a step
        difference = (found.float() - expected.float()).abs().max()
        assert difference <= expected.abs().max() * 2**-8
        assert (found == expected).float().mean() > 0.999


def test_a_tied_lm_head_is_adapted_without_the_embedding(tied_target, tmp_path):
    adapter = save_adapter(tied_target.model, tmp_path / "adapter")
    expected = logits_with_adapter_on(tied_target.model, adapter, IDS_BT)
    model = load_tuned(tied_target, adapter)
    assert not (model.training or model.lm_head.weight.requires_grad)
    tensors = load_file(Path(tied_target.model) / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert not torch.equal(model.get_output_embeddings().weight, embedding)
    model.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert again.config.tie_word_embeddings is False
    for each in (model, again):
        torch.testing.assert_close(each(input_ids=IDS_BT).logits, expected, atol=1e-4, rtol=1e-5)


def test_an_adapter_missing_or_of_another_target_is_refused(random_target, tied_target, adapter):
    for spec, directory in ((random_target, adapter.parent), (tied_target, adapter)):
        with pytest.raises(DataError, match="no adapter of this target"):
            load_tuned(spec, directory)
