"""Every part of a Hub target is that of the commit which the configuration names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, PhiConfig, PhiForCausalLM

from pipeline.config import TargetConfig
from pipeline.targets.lm_head import read_embedding, read_lm_head, read_logit_changes
from pipeline.targets.loading import load_causal_lm
from pipeline.targets.spec import (
    TargetSpec,
    eos_token_ids,
    load_tokenizer,
    model_config,
    resolve,
    weight_files,
)
from pipeline.targets.vllm_engine import engine_arguments
from tests.targets.conftest import EOS
from tests.targets.hub_cache import COMMIT, cached_at_commit


@pytest.fixture
def at_commit(random_target, tmp_path, monkeypatch) -> TargetSpec:
    model = cached_at_commit(random_target.model, tmp_path, monkeypatch)
    return replace(random_target, model=model, revision=COMMIT)


def test_a_branch_is_resolved_to_its_commit(at_commit):
    found = resolve(TargetConfig(model=at_commit.model, revision="tried"), on_gpu=False)
    assert found == at_commit


def test_configuration_tokenizer_and_ends_are_of_the_commit(at_commit, random_target):
    assert model_config(at_commit).hidden_size == model_config(random_target).hidden_size
    assert load_tokenizer(at_commit).get_vocab() == load_tokenizer(random_target).get_vocab()
    assert eos_token_ids(at_commit) == EOS


@pytest.mark.parametrize("fetch", [True, False])
def test_identifying_files_are_of_the_commit(at_commit, random_target, fetch):
    found = weight_files(at_commit, fetch=fetch)
    assert {path.parent.name for path in found} == {COMMIT}
    assert [path.name for path in found] == [path.name for path in weight_files(random_target)]


def test_loaded_weights_are_of_the_commit(at_commit, random_target):
    found, expected = load_causal_lm(at_commit), load_causal_lm(random_target)
    assert torch.equal(found.lm_head.weight, expected.lm_head.weight)


def test_vllm_is_told_the_commit(at_commit):
    assert engine_arguments(at_commit, {}, 0)["revision"] == COMMIT


@pytest.mark.parametrize("shard_size", ["5GB", "10KB"])
def test_matrices_of_the_output_layer_are_of_the_commit(tmp_path, monkeypatch, shard_size):
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = PhiForCausalLM(PhiConfig(**sizes, num_attention_heads=1))
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(tmp_path / "made", max_shard_size=shard_size)
    spec = TargetSpec(cached_at_commit(tmp_path / "made", tmp_path / "cache", monkeypatch), COMMIT)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # the files alone are read
    assert torch.equal(read_lm_head(spec), model.lm_head.weight)
    assert torch.equal(read_embedding(spec), model.get_input_embeddings().weight)
    assert torch.equal(read_logit_changes(spec).bias_V, model.lm_head.bias)
