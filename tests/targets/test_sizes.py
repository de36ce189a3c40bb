"""Sizes from a config.json, against what a model of that family holds."""

from __future__ import annotations

import pytest
import torch
import transformers

from pipeline.targets.sizes import cached_numbers

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 24}
HEAD = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 12}
EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}


@pytest.mark.parametrize("family", ["DeepseekV3", "DeepseekV2", "Glm4MoeLite", "MiniCPM3"])
def test_what_latent_attention_keeps_of_a_token_is_what_the_model_s_own_cache_holds(family):
    """Counted after a forward of five tokens."""
    experts = {} if family == "MiniCPM3" else EXPERTS
    config = getattr(transformers, f"{family}Config")(**SHAPE, **ATTENTION, **HEAD, **experts)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.inference_mode():
        layers = model(torch.zeros(1, 5, dtype=torch.long), use_cache=True).past_key_values.layers
    assert cached_numbers(config) * 5 == sum(layer.keys.numel() + layer.values.numel() for layer in layers)
