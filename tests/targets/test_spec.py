from __future__ import annotations

import dataclasses
import json
import logging
import pickle
import shutil
from pathlib import Path

import httpx
import pytest
import torch
from huggingface_hub import errors as hub
from huggingface_hub.utils import _http
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from pipeline.config import TargetConfig
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.targets.files import target_errors
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
from tests.targets.conftest import CONTEXT, EOS, VOCAB_SIZE


@pytest.fixture
def copied(random_target: TargetSpec, tmp_path: Path) -> Path:
    return Path(shutil.copytree(random_target.model, tmp_path / "target"))


def edit(path: Path, **changes: object) -> None:
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_the_eos_set_is_generation_configs(random_target: TargetSpec) -> None:
    assert eos_token_ids(random_target) == EOS


def test_the_eos_set_falls_back_to_the_model_and_then_to_the_tokenizer(copied: Path) -> None:
    (copied / "generation_config.json").unlink()
    assert eos_token_ids(TargetSpec(str(copied))) == (2,)
    edit(copied / "config.json", eos_token_id=None)
    assert eos_token_ids(TargetSpec(str(copied))) == (3,)


@pytest.mark.parametrize(
    "ids",
    [
        [],
        True,
        [True],
        [2, False],
        -1,
        [2, -1],
        2.0,
        [2.5],
        "2",
        ["2"],
        [None],
        [[2]],
        {},
        VOCAB_SIZE,
        [2, VOCAB_SIZE],
    ],
    ids=str,
)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_end_ids_that_are_no_tokens_are_refused(copied: Path, file: str, ids: object) -> None:
    if file == "config.json":
        (copied / "generation_config.json").unlink()
    edit(copied / file, eos_token_id=ids)
    for use in (
        lambda: eos_token_ids(TargetSpec(str(copied))),
        lambda: resolve(TargetConfig(model=str(copied))),
    ):
        with pytest.raises(ConfigError, match=f"eos_token_id.*{file}"):
            use()


def test_the_last_token_of_the_vocabulary_may_end_a_text(copied: Path) -> None:
    edit(copied / "generation_config.json", eos_token_id=[VOCAB_SIZE - 1, 0, 0])
    assert eos_token_ids(TargetSpec(str(copied))) == (0, VOCAB_SIZE - 1)


def test_an_end_that_generation_config_leaves_open_is_the_model_s(copied: Path) -> None:
    edit(copied / "generation_config.json", eos_token_id=None)
    assert eos_token_ids(TargetSpec(str(copied))) == (2,)


def test_end_ids_of_a_nested_configuration_are_held_against_the_text_vocabulary(
    copied: Path,
) -> None:
    text = Gemma3TextConfig(vocab_size=VOCAB_SIZE + 8, num_hidden_layers=1)
    Gemma3Config(text_config=text.to_dict(), eos_token_id=[2, VOCAB_SIZE + 7]).save_pretrained(
        copied
    )
    (copied / "generation_config.json").unlink()
    assert eos_token_ids(TargetSpec(str(copied))) == (2, VOCAB_SIZE + 7)
    edit(copied / "config.json", eos_token_id=VOCAB_SIZE + 8)
    with pytest.raises(ConfigError, match="eos_token_id"):
        eos_token_ids(TargetSpec(str(copied)))
    edit(copied / "config.json", eos_token_id=None)
    assert eos_token_ids(TargetSpec(str(copied))) == (3,), "the tokenizer's"


def test_dtype_auto_is_float32_on_a_cpu_and_the_models_own_on_a_gpu(copied: Path) -> None:
    edit(copied / "config.json", dtype="bfloat16")
    target = TargetConfig(model=str(copied))
    assert resolve(target, on_gpu=False).dtype == "float32"
    assert resolve(target, on_gpu=True).dtype == "bfloat16"
    assert resolve(target.model_copy(update={"dtype": "float16"}), on_gpu=False).dtype == "float16"


def test_max_tokens_shortens_the_context_and_cannot_extend_it(random_target: TargetSpec) -> None:
    assert context_length(random_target) == CONTEXT
    assert context_length(dataclasses.replace(random_target, max_tokens=50)) == 50
    assert context_length(dataclasses.replace(random_target, max_tokens=129)) == context_length(
        random_target
    )


def test_a_chat_template_is_text_or_a_file(random_target: TargetSpec, tmp_path: Path) -> None:
    path = tmp_path / "vicuna.jinja"
    text = "{{ messages }}"
    path.write_text(text)
    for template in (str(path), text):
        assert (
            resolve(TargetConfig(model=random_target.model, chat_template=template)).chat_template
            == text
        )
    with pytest.raises(ConfigError, match="There is no file"):
        resolve(
            TargetConfig(model=random_target.model, chat_template=str(tmp_path / "missing.jinja"))
        )


def test_a_spec_pickles_and_goes_into_json(random_target: TargetSpec) -> None:
    assert pickle.loads(pickle.dumps(random_target)) == random_target
    assert TargetSpec(**json.loads(json.dumps(dataclasses.asdict(random_target)))) == random_target


def test_a_relative_directory_becomes_absolute(
    random_target: TargetSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(random_target.model).parent)
    assert (
        resolve(TargetConfig(model="./" + Path(random_target.model).name)).model
        == random_target.model
    )


# --- what identifies a target


def test_weight_files_are_weights_configuration_tokenizer_and_template(copied: Path) -> None:
    (copied / "chat_template.jinja").write_text("{{ messages }}")
    (copied / "README.md").write_text("not part of the target")
    (copied / "consolidated.safetensors").write_text("another form of the same weights")
    names = [path.name for path in weight_files(TargetSpec(str(copied)))]
    assert names == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_model_code_counts_where_it_is_run(copied: Path) -> None:
    (copied / "modeling.py").write_text("")
    for trusted in (False, True):
        files = weight_files(TargetSpec(str(copied), trust_remote_code=trusted))
        assert (copied / "modeling.py" in files) == trusted


def test_a_missing_shard_is_named(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "model-00001-of-00002.safetensors")
    index = {
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        }
    }
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks model-00002-of-00002"):
        weight_files(TargetSpec(str(copied)))


@pytest.mark.parametrize("shard", ["../others.safetensors", "/others.safetensors", 1])
def test_an_index_names_files_of_the_target_alone(copied: Path, shard: object) -> None:
    (copied / "model.safetensors").rename(copied / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"lm_head.weight": shard}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="which file of the target holds which tensor"):
        weight_files(TargetSpec(str(copied)))


def test_a_target_without_weights_is_refused(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "model.pth")
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        weight_files(TargetSpec(str(copied)))


# --- targets that are none


def test_a_directory_that_is_no_target_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory") as refused:
        resolve(TargetConfig(model=str(tmp_path / "demo-target")))
    assert "make demo" in refused.value.fix
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ConfigError, match="holds no config"):
        resolve(TargetConfig(model=str(tmp_path)))


def test_what_the_hub_s_client_logs_of_its_retries_is_not_shown() -> None:
    _http.logger.setLevel(logging.WARNING)
    with (
        pytest.raises(EnvironmentFault, match="can be neither read nor fetched now"),
        target_errors("owner/model", None),
    ):
        assert not _http.logger.isEnabledFor(logging.WARNING)
        raise hub.LocalEntryNotFoundError("x")


def test_a_broken_tokenizer_is_a_configuration_error(copied: Path) -> None:
    (copied / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer that loads"):
        load_tokenizer(TargetSpec(str(copied)))


def test_an_unknown_architecture_is_a_configuration_error(copied: Path) -> None:
    edit(copied / "config.json", model_type="perceptron-9000")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        resolve(TargetConfig(model=str(copied)))


@pytest.mark.parametrize(
    ("kind", "expected", "words"),
    [
        (hub.RepositoryNotFoundError, ConfigError, "no target nobody/nothing"),
        (hub.GatedRepoError, ConfigError, "hf auth login"),
        (hub.RevisionNotFoundError, ConfigError, "at revision v9"),
        (hub.LocalEntryNotFoundError, EnvironmentFault, "network"),
        (hub.OfflineModeIsEnabled, EnvironmentFault, "HF_HUB_OFFLINE"),
        (
            hub.HTTPError,
            EnvironmentFault,
            "HF_ENDPOINT",
        ),  # such as httpx2.UnsupportedProtocol, for one without a scheme
    ],
)
def test_the_hubs_refusals_become_ours(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], expected: type[Exception], words: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        if issubclass(kind, hub.HfHubHTTPError):
            raise kind(
                "no", response=httpx.Response(404, request=httpx.Request("GET", "http://hub"))
            )
        raise kind("no")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(expected, match=words):
        resolve(TargetConfig(model="nobody/nothing", revision="v9"))


def test_a_quantized_checkpoint_is_not_quantized_again(copied: Path) -> None:
    edit(copied / "config.json", quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ConfigError, match="quantized already"):
        resolve(TargetConfig(model=str(copied), quantization="4bit"))


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("mamba", "linear_attention"),
        ("falcon_mamba", "linear_attention"),
        ("qwen3_next", "linear_attention"),
        ("jamba", "mamba"),
        ("recurrent_gemma", "recurrent"),
        ("rwkv", "running state"),
        ("lfm2", "running state"),
        ("llama4_text", "chunked_attention"),
        ("bloom", "ALiBi"),
        ("t5", "encoder-decoder"),
    ],
)
def test_a_target_that_cannot_verify_a_tree_is_refused(model_type: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot verify a tree: .*{words}"):
        require_verifiable(AutoConfig.for_model(model_type))


def test_a_masked_language_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="BertForMaskedLM is no causal language model"):
        require_verifiable(BertConfig(architectures=["BertForMaskedLM"]))


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(architectures=["LlamaForCausalLM"]),
        MistralConfig(sliding_window=1024),
        Qwen3Config(use_sliding_window=True, max_window_layers=2),
        AutoConfig.for_model("gpt2", architectures=["GPT2LMHeadModel"]),
        AutoConfig.for_model("gemma2"),
        AutoConfig.for_model("mixtral"),
    ],
    ids=lambda config: config.model_type,
)
def test_attention_in_every_layer_is_accepted(config: LlamaConfig) -> None:
    require_verifiable(config)


def test_latent_attention_caches_what_the_model_s_own_cache_holds() -> None:
    """Counted after a forward of five tokens."""
    config = DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=12,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.inference_mode():
        layers = model(torch.zeros(1, 5, dtype=torch.long), use_cache=True).past_key_values.layers
    assert cached_numbers(config) * 5 == sum(
        layer.keys.numel() + layer.values.numel() for layer in layers
    )
