"""An EAGLE-1 model with attention, measured by the check in real vLLM.

Letters: D hidden size, H size of an attention head.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from pipeline.artifacts.check_result import GreedyMatch
from pipeline.config import CheckConfig
from pipeline.errors import DataError
from pipeline.evaluation.measuring import measure_heads
from pipeline.targets import vllm_decode
from pipeline.targets.spec import model_config
from tests.cluster import work_here

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]


def with_attention(target, directory):
    """Write a draft model that is right on the counting target because of its attention.

    Its state z is the embedding e of the token just read, with the sign of the first H numbers
    turned. Every position attends to itself, by queries and keys that are the same sharp function
    of z, and the attention adds -2 of the first H numbers of z: z + attention(z) = e, which is what
    the target's lm_head reads. Without it, half of e is wrong.
    """
    config, size_D, size_H = model_config(target), 128, 64
    first_HD = torch.eye(size_H, size_D)
    turned_D, from_first_query_D = torch.ones(size_D), torch.zeros(size_D)
    turned_D[:size_H], from_first_query_D[:size_H] = -1, -2
    tensors = {
        "fc.weight": torch.cat([turned_D.diag(), torch.zeros(size_D, size_D)], dim=1),
        "layers.0.self_attn.q_proj.weight": 2 * first_HD.repeat(2, 1),
        "layers.0.self_attn.k_proj.weight": 2 * first_HD,
        "layers.0.self_attn.v_proj.weight": first_HD.clone(),
        "layers.0.self_attn.o_proj.weight": from_first_query_D.diag(),
        "layers.0.mlp.gate_proj.weight": torch.zeros(64, size_D),
        "layers.0.mlp.up_proj.weight": torch.zeros(64, size_D),
        "layers.0.mlp.down_proj.weight": torch.zeros(size_D, 64),
        "layers.0.post_attention_layernorm.weight": torch.ones(size_D),
    }
    own = {"num_hidden_layers": 1, "intermediate_size": 64, "architectures": ["LlamaForCausalLM"]}
    (directory / "config.json").write_text(json.dumps({**config.to_dict(), **own}))
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_eagle_1_is_measured_in_vllm_and_refused_natively(counting_target, tmp_path, monkeypatch):
    work_here(monkeypatch, vllm_decode)
    heads = with_attention(counting_target, tmp_path)
    template = "{% for message in messages %}{{ message.content }}w3{% endfor %}"
    target = replace(counting_target, chat_template=template)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "w9"}\n{"prompt": "w70"}\n')
    settings = CheckConfig(
        prompts=questions, engines=("vllm",), max_new_tokens=33, repeats=1, baselines=()
    )
    found, _ = measure_heads(heads, target, settings, draft_tokens=3)
    assert found.check.passed, found.check
    served = found.check.vllm
    assert served.greedy_match == GreedyMatch(2, 2, 0)
    assert 3.5 < served.acceleration_rate <= 4, "three drafted tokens and the target's own"
    natively = settings.model_copy(update={"engines": ("native", "vllm")})
    with pytest.raises(DataError, match=r"EAGLE-1 model.*--engine vllm"):
        measure_heads(heads, target, natively, draft_tokens=3)
