from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    LlamaForCausalLM,
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

V, D = 40, 32


def llama(tied: bool = False) -> LlamaForCausalLM:
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, tie_word_embeddings=tied))


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=D, n_layer=1, n_head=1, n_positions=16))


def neox() -> GPTNeoXForCausalLM:
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 1}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=1))


@pytest.fixture
def no_loading(monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(lm_head, "load_causal_lm", refuse)


@pytest.mark.parametrize(
    "make", [llama, lambda: llama(tied=True), gpt2, neox], ids=["llama", "tied", "gpt2", "neox"]
)
def test_lm_head_and_embedding_are_read_without_loading_the_model(make, tmp_path, no_loading):
    model = make()
    model.save_pretrained(tmp_path)
    assert torch.equal(
        read_lm_head(TargetSpec(str(tmp_path))), model.get_output_embeddings().weight
    )
    assert torch.equal(
        read_embedding(TargetSpec(str(tmp_path))), model.get_input_embeddings().weight
    )


def test_of_a_sharded_checkpoint_only_the_file_that_holds_it_is_opened(tmp_path, no_loading):
    model = llama()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    holders = [
        path for path in tmp_path.glob("*.safetensors") if "lm_head.weight" in lm_head._names(path)
    ]
    others = set(tmp_path.glob("*.safetensors")) - set(holders)
    assert len(holders) == 1 and others
    for path in others:
        path.write_bytes(b"not to be read")
    assert torch.equal(read_lm_head(TargetSpec(str(tmp_path))), model.lm_head.weight)


def test_an_older_bin_checkpoint_is_read_too(tmp_path, no_loading):
    model = llama()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert torch.equal(read_lm_head(TargetSpec(str(tmp_path))), model.lm_head.weight)


def test_the_lm_head_comes_in_the_dtype_that_the_target_runs_in(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path)
    read = read_lm_head(TargetSpec(str(tmp_path), dtype="bfloat16"))
    assert torch.equal(read, model.lm_head.weight.bfloat16())


def test_a_target_whose_files_leave_a_doubt_is_loaded(tmp_path, monkeypatch):
    model = llama()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(lm_head, "OUTPUT_EMBEDDINGS", ("unheard_of.weight",))
    assert torch.equal(read_lm_head(TargetSpec(str(tmp_path))), model.lm_head.weight)


SMALL = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
OF_A_FAMILY = [
    LlamaConfig(**SMALL, tie_word_embeddings=True),
    Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=16, final_logit_softcapping=0.5),
    CohereConfig(**SMALL, logit_scale=0.25, pad_token_id=0),
    GraniteConfig(**SMALL, logits_scaling=4.0),
    HyperCLOVAXConfig(**SMALL, logits_scaling=4.0),
    PhiConfig(**SMALL),
]


@pytest.mark.parametrize("config", OF_A_FAMILY, ids=lambda config: config.model_type)
def test_the_target_s_own_logits_follow_from_its_states_and_files(config, tmp_path, no_loading):
    """Bias, scale and cap included, against transformers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if "embed" in name or "lm_head" in name:
            torch.nn.init.normal_(weight)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        found = model(torch.arange(9)[None], output_hidden_states=True)
    spec = TargetSpec(str(tmp_path))
    head = TargetHead(read_lm_head(spec), *read_logit_changes(spec))
    torch.testing.assert_close(
        head.logits(found.hidden_states[-1][0]), found.logits[0], rtol=1e-4, atol=1e-4
    )


def test_a_bias_is_read_from_the_loaded_model_where_the_files_do_not_name_their_tensors(
    tmp_path, monkeypatch
):
    model = AutoModelForCausalLM.from_config(PhiConfig(**SMALL))
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(lm_head, "_weight_map", lambda _: {})
    assert torch.equal(read_logit_changes(TargetSpec(str(tmp_path))).bias_V, model.lm_head.bias)


def test_a_target_without_the_lm_head_that_vllm_would_not_miss_is_refused(random_target, tmp_path):
    directory = Path(shutil.copytree(random_target.model, tmp_path / "headless"))
    require_lm_head(TargetSpec(str(directory)))
    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"files lack lm_head\.weight"):
        require_lm_head(TargetSpec(str(directory)))
    config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config))
    require_lm_head(TargetSpec(str(directory)))
