from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
)

from pipeline.errors import ConfigError
from pipeline.targets.lora import add_lora, require_tunable
from pipeline.targets.spec import TargetSpec

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
    "phi3": (Phi3Config(**SIZES), {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"}, 9),
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
    found = [re.search(r"(\w+)\.lora_A", name)[1] for name, _ in tuned.named_parameters() if "lora_A" in name]
    assert set(found) == names and len(found) == number
    trained = {name: weight for name, weight in tuned.named_parameters() if weight.requires_grad}
    assert all("lora_" in name and weight.dtype == torch.float32 for name, weight in trained.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_it_may_be_tuned(tmp_path, family):
    require_tunable(saved(tmp_path, FAMILIES[family][0]), rank=32, sharded=True)


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        (MixtralConfig(**SIZES, num_local_experts=2), {}, "LoRA does not find .*mlp.gate.* 5 more"),
        (Gemma2Config(**SIZES, head_dim=16), {}, "final_logit_softcapping"),
        (LlamaConfig(**SIZES), {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "cannot be merged"),
    ],
    ids=["experts", "softcap", "quantized"],
)
def test_it_is_refused_before_its_weights_are_read(tmp_path, config, more, said):
    with pytest.raises(ConfigError, match=said) as caught:
        require_tunable(saved(tmp_path, config, architectures=["AnyForCausalLM"], **more), rank=4)
    assert caught.value.fix and "\n" not in str(caught.value)


def test_a_rank_beyond_the_hidden_size_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"33.*hidden size, 32.*lora_rank"):
        require_tunable(saved(tmp_path, LlamaConfig(**SIZES)), rank=33)
