from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
)

from pipeline.errors import ConfigError
from pipeline.heads.losses import TargetHead
from pipeline.targets import lm_head
from pipeline.targets.lm_head import (
    read_embedding,
    read_lm_head,
    read_logit_changes,
    require_lm_head,
)
from pipeline.targets.spec import TargetSpec
from tests.targets.conftest import edit, without
from tests.targets.hub_cache import COMMIT, cached_at_commit
from tests.tiny_models import SIZES, tiny_llama, tiny_model


@pytest.fixture
def no_loading(monkeypatch):
    monkeypatch.setattr(lm_head, "load_causal_lm", None)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=1, n_positions=16),
    ],
    ids=["llama", "tied", "gpt2"],
)
def test_matrices_are_read_without_loading_the_model(config, tmp_path, no_loading):
    model, spec = tiny_model(config), TargetSpec(str(tmp_path))
    model.save_pretrained(tmp_path)
    assert torch.equal(read_lm_head(spec), model.get_output_embeddings().weight)
    assert torch.equal(read_embedding(spec), model.get_input_embeddings().weight)


def test_only_the_shard_that_holds_the_matrix_is_opened(tmp_path, no_loading):
    model = tiny_llama()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    for path in tmp_path.glob("*.safetensors"):
        if "lm_head.weight" not in load_file(path):
            path.write_bytes(b"not to be read")
    found = read_lm_head(TargetSpec(str(tmp_path), dtype="bfloat16"))
    assert torch.equal(found, model.lm_head.weight.bfloat16())


@pytest.fixture
def biased():
    """A model whose lm_head has a bias."""
    model = tiny_model(PhiConfig(**SIZES))
    torch.nn.init.normal_(model.lm_head.bias)
    return model


def assert_read(spec, model):
    assert torch.equal(read_lm_head(spec), model.lm_head.weight)
    assert torch.equal(read_embedding(spec), model.get_input_embeddings().weight)
    assert torch.equal(read_logit_changes(spec).bias_V, model.lm_head.bias)


@pytest.mark.parametrize("shard_size", ["5GB", "10KB"])
def test_matrices_of_a_hub_target_are_of_its_commit(
    biased, tmp_path, monkeypatch, no_loading, shard_size
):
    biased.save_pretrained(tmp_path / "made", max_shard_size=shard_size)
    model = cached_at_commit(tmp_path / "made", tmp_path / "cache", monkeypatch)
    assert_read(TargetSpec(model, COMMIT), biased)


def test_matrices_are_read_from_a_bin_checkpoint(biased, tmp_path, no_loading):
    biased.config.save_pretrained(tmp_path)
    torch.save(biased.state_dict(), tmp_path / "pytorch_model.bin")
    assert_read(TargetSpec(str(tmp_path)), biased)


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=0.5),
        CohereConfig(**SIZES, logit_scale=0.25),
        GraniteConfig(**SIZES, logits_scaling=4.0),
        PhiConfig(**SIZES),
    ],
    ids=lambda config: config.model_type,
)
def test_logits_follow_from_states_and_files(config, tmp_path, no_loading):
    """Compare with transformers, including bias, scale and cap."""
    model, spec = tiny_model(config), TargetSpec(str(tmp_path))
    for name, weight in model.named_parameters():
        if "embed" in name or "lm_head" in name:
            torch.nn.init.normal_(weight)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        output = model(torch.arange(9)[None], output_hidden_states=True)
    head = TargetHead(read_lm_head(spec), *read_logit_changes(spec))
    logits_TV = head.logits(output.hidden_states[-1][0])
    torch.testing.assert_close(logits_TV, output.logits[0], rtol=1e-4, atol=1e-4)


def test_a_missing_lm_head_that_vllm_ignores_is_refused(copied):
    spec = TargetSpec(str(copied))
    require_lm_head(spec)
    without(copied, "lm_head.weight")
    with pytest.raises(ConfigError, match=r"missing keys, lm_head\.weight"):
        require_lm_head(spec)
    edit(copied / "config.json", tie_word_embeddings=True)
    require_lm_head(spec)
