from __future__ import annotations

import dataclasses
import json

import httpx
import pytest
import torch
from huggingface_hub import errors as hub
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    LlamaConfig,
)

from pipeline.config import TargetConfig
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.targets.loading import load_causal_lm
from pipeline.targets.spec import (
    TargetSpec,
    cached_numbers,
    context_length,
    eos_token_ids,
    load_tokenizer,
    require_verifiable,
    resolve,
    weight_files,
)
from pipeline.targets.vllm_engine import engine_arguments
from tests.targets.conftest import CONTEXT, EOS, VOCAB_SIZE, edit
from tests.targets.hub_cache import COMMIT, cached_at_commit
from tests.tiny_models import SIZES, tiny_model


def resolved(model, on_gpu=False, **settings):
    return resolve(TargetConfig(model=str(model), **settings), on_gpu=on_gpu)


# --- end-of-sequence ids


def test_eos_ids_fall_back_from_generation_config_to_tokenizer(copied):
    spec = TargetSpec(str(copied))
    assert eos_token_ids(spec) == EOS
    edit(copied / "generation_config.json", eos_token_id=[VOCAB_SIZE - 1, 0, 0])
    assert eos_token_ids(spec) == (0, VOCAB_SIZE - 1)
    edit(copied / "generation_config.json", eos_token_id=None)
    assert eos_token_ids(spec) == (2,)
    (copied / "generation_config.json").unlink()
    assert eos_token_ids(spec) == (2,)
    edit(copied / "config.json", eos_token_id=None)
    assert eos_token_ids(spec) == (3,)


def test_eos_ids_that_are_no_tokens_are_refused(copied):
    edit(copied / "generation_config.json", eos_token_id=[2, VOCAB_SIZE])
    with pytest.raises(ConfigError, match="eos_token_id"):
        resolved(copied)


# --- what resolve decides


def test_dtype_auto_is_the_models_own_on_a_gpu_alone(copied):
    edit(copied / "config.json", dtype="bfloat16")
    assert resolved(copied, on_gpu=False).dtype == "float32"
    assert resolved(copied, on_gpu=True).dtype == "bfloat16"
    assert resolved(copied, on_gpu=False, dtype="float16").dtype == "float16"


def test_max_tokens_shortens_the_context_and_cannot_extend_it(random_target):
    for max_tokens, expected in ((None, CONTEXT), (50, 50), (129, CONTEXT)):
        spec = dataclasses.replace(random_target, max_tokens=max_tokens)
        assert context_length(spec) == expected


def test_a_chat_template_is_text_or_a_file(random_target, tmp_path):
    path, text = tmp_path / "vicuna.jinja", "{{ messages }}"
    path.write_text(text)
    for template in (str(path), text):
        assert resolved(random_target.model, chat_template=template).chat_template == text
    with pytest.raises(ConfigError, match=r"target\.chat_template"):
        resolved(random_target.model, chat_template=str(tmp_path / "missing.jinja"))


# --- files that identify a target


def test_weight_files_are_all_that_identifies_a_target(copied):
    for name in ("chat_template.jinja", "README.md", "consolidated.safetensors", "modeling.py"):
        (copied / name).write_text("")
    names = [path.name for path in weight_files(TargetSpec(str(copied)))]
    assert names == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    trusted = weight_files(TargetSpec(str(copied), trust_remote_code=True))
    assert {path.name for path in trusted} - set(names) == {"modeling.py"}


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_a_target_that_lacks_weights_is_refused(copied):
    (copied / "model.safetensors").rename(copied / FIRST)
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        weight_files(TargetSpec(str(copied)))
    index = {"weight_map": {"a": FIRST, "b": SECOND}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=SECOND):
        weight_files(TargetSpec(str(copied)))


def test_every_part_of_a_hub_target_is_of_one_commit(random_target, tmp_path, monkeypatch):
    model = cached_at_commit(random_target.model, tmp_path, monkeypatch)
    spec = resolved(model, on_gpu=False, revision="tried")
    assert spec == dataclasses.replace(random_target, model=model, revision=COMMIT)
    assert eos_token_ids(spec) == EOS and len(load_tokenizer(spec)) == VOCAB_SIZE
    expected = load_causal_lm(random_target).lm_head.weight
    assert torch.equal(load_causal_lm(spec).lm_head.weight, expected)
    assert engine_arguments(spec, {}, 0)["revision"] == COMMIT
    names = [path.name for path in weight_files(random_target)]
    for fetch in (True, False):
        found = weight_files(spec, fetch=fetch)
        assert [(path.parent.name, path.name) for path in found] == [(COMMIT, n) for n in names]


# --- targets that are none


def test_a_directory_that_is_no_target_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_text("")
    for model in (tmp_path, tmp_path / "demo-target"):
        with pytest.raises(ConfigError, match=f"{model.name}.*make demo"):
            resolved(model)


def test_a_target_that_transformers_cannot_read_is_refused(copied):
    (copied / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="cannot load a tokenizer"):
        load_tokenizer(TargetSpec(str(copied)))
    edit(copied / "config.json", model_type="perceptron-9000")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        resolved(copied)


NOT_FOUND = httpx.Response(404, request=httpx.Request("GET", "http://hub"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (hub.RepositoryNotFoundError("no", response=NOT_FOUND), ConfigError),
        (hub.LocalEntryNotFoundError("no"), EnvironmentFault),
    ],
)
def test_hub_errors_become_ours(monkeypatch, error, expected):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(expected, match="nobody/nothing at revision v9"):
        resolved("nobody/nothing", revision="v9")


def test_a_quantized_checkpoint_is_not_quantized_again(copied):
    edit(copied / "config.json", quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ConfigError, match="quantized already"):
        resolved(copied, quantization="4bit")


# --- trees of candidates


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("jamba", "mamba"),
        ("llama4_text", "chunked_attention"),
        ("mpt", "ALiBi"),
        ("bert", "BertForMaskedLM is no causal language model"),
        ("t5", "encoder-decoder"),
    ],
)
def test_a_target_that_cannot_verify_a_tree_is_refused(model_type, words):
    architectures = ["BertForMaskedLM"] if model_type == "bert" else None
    with pytest.raises(ConfigError, match=f"cannot verify a tree: .*{words}"):
        require_verifiable(AutoConfig.for_model(model_type, architectures=architectures))


def test_attention_in_every_layer_is_accepted():
    for config in (
        LlamaConfig(architectures=["LlamaForCausalLM"]),
        AutoConfig.for_model("gpt2", architectures=["GPT2LMHeadModel"]),
    ):
        require_verifiable(config)


def test_latent_attention_caches_what_the_models_own_cache_holds():
    """Compare with the cache of transformers after a forward of five tokens."""
    latent = {"q_lora_rank": 8, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12}
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    config = DeepseekV3Config(**SIZES, **latent, **experts, v_head_dim=12, n_group=1, topk_group=1)
    with torch.inference_mode():
        output = tiny_model(config)(torch.zeros(1, 5, dtype=torch.long), use_cache=True)
    layers = output.past_key_values.layers
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in layers)
    assert cached_numbers(config) * 5 == numbers
