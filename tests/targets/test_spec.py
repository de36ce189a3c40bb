from __future__ import annotations

import dataclasses
import json
import logging
import pickle
import shutil
from pathlib import Path

import httpx
import pytest
from huggingface_hub import errors as hub
from huggingface_hub.utils import _http
from transformers import AutoConfig, BertConfig, LlamaConfig, MistralConfig, Qwen3Config

from pipeline.config import TargetConfig
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.targets.files import hub_errors
from pipeline.targets.spec import (
    TargetSpec,
    context_length,
    eos_token_ids,
    load_tokenizer,
    require_verifiable,
    resolve,
    weight_files,
)
from tests.targets.conftest import CONTEXT, EOS


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


def test_dtype_auto_is_float32_on_a_cpu_and_the_models_own_on_a_gpu(copied: Path) -> None:
    edit(copied / "config.json", dtype="bfloat16")
    target = TargetConfig(model=str(copied))
    assert resolve(target, on_gpu=False).dtype == "float32"
    assert resolve(target, on_gpu=True).dtype == "bfloat16"
    assert resolve(target.model_copy(update={"dtype": "float16"}), on_gpu=False).dtype == "float16"


def test_max_tokens_shortens_the_context_and_cannot_extend_it(random_target: TargetSpec) -> None:
    assert context_length(random_target) == CONTEXT
    assert context_length(dataclasses.replace(random_target, max_tokens=50)) == 50
    assert context_length(dataclasses.replace(random_target, max_tokens=129)) == context_length(random_target)


def test_a_chat_template_is_text_or_a_file(random_target: TargetSpec, tmp_path: Path) -> None:
    path = tmp_path / "vicuna.jinja"
    text = "{{ messages }}"
    path.write_text(text)
    for template in (str(path), text):
        assert resolve(TargetConfig(model=random_target.model, chat_template=template)).chat_template == text
    with pytest.raises(ConfigError, match="There is no file"):
        resolve(TargetConfig(model=random_target.model, chat_template=str(tmp_path / "missing.jinja")))


def test_a_spec_pickles_and_goes_into_json(random_target: TargetSpec) -> None:
    assert pickle.loads(pickle.dumps(random_target)) == random_target
    assert TargetSpec(**json.loads(json.dumps(dataclasses.asdict(random_target)))) == random_target


def test_a_relative_directory_becomes_absolute(
    random_target: TargetSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(random_target.model).parent)
    assert resolve(TargetConfig(model="./" + Path(random_target.model).name)).model == random_target.model


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
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks 1 of 2 weight files, model-00002-of-00002"):
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
    with pytest.raises(ConfigError, match=r"no model\.safetensors, only \.pth files"):
        weight_files(TargetSpec(str(copied)))


# --- targets that are none


def test_a_missing_directory_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        resolve(TargetConfig(model=str(tmp_path / "nothing")))


def test_a_demo_s_configuration_before_the_demo_says_how_its_target_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist") as refused:
        resolve(TargetConfig(model=str(tmp_path / "demo-target")))
    assert "make demo" in refused.value.fix


def test_what_the_hub_s_client_logs_of_its_retries_is_not_shown() -> None:
    _http.logger.setLevel(logging.WARNING)
    with pytest.raises(EnvironmentFault, match="can be neither read nor fetched now"), hub_errors("owner/model", None):
        assert not _http.logger.isEnabledFor(logging.WARNING)
        raise hub.LocalEntryNotFoundError("x")


def test_a_gguf_directory_says_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ConfigError, match=r"only model\.gguf.*save_pretrained"):
        resolve(TargetConfig(model=str(tmp_path)))


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
            raise kind("no", response=httpx.Response(404, request=httpx.Request("GET", "http://hub")))
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
