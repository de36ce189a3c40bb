"""EAGLE-3 exports: the files that vLLM, SGLang, TensorRT-LLM and llama.cpp look for."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import DataError
from pipeline.export.directory import read_heads, write_export
from pipeline.export.layout import ExportLayout, read_layout
from pipeline.heads.eagle3 import Eagle3Heads
from pipeline.heads.shapes import Eagle3Shape
from tests.export.exports import TARGET, TREE, TokenizerStub
from tests.heads.pruning import pruned
from tests.tiny_models import tiny_llama

SIZE, VOCAB, INNER, LAYERS = 32, 40, 24, (1, 3, 5)
TOKENS = [0, 1, 5, 6, 17, 39]
SIZES = {
    "fc.weight": (SIZE, 3 * SIZE),
    "layers.0.hidden_norm.weight": (SIZE,),
    "layers.0.input_layernorm.weight": (SIZE,),
    "layers.0.post_attention_layernorm.weight": (SIZE,),
    "layers.0.self_attn.q_proj.weight": (4 * 8, 2 * SIZE),
    "layers.0.self_attn.k_proj.weight": (2 * 8, 2 * SIZE),
    "layers.0.self_attn.v_proj.weight": (2 * 8, 2 * SIZE),
    "layers.0.self_attn.o_proj.weight": (SIZE, 4 * 8),
    "layers.0.mlp.gate_proj.weight": (INNER, SIZE),
    "layers.0.mlp.up_proj.weight": (INNER, SIZE),
    "layers.0.mlp.down_proj.weight": (SIZE, INNER),
    "norm.weight": (SIZE,),
}


def random_heads(*, is_pruned: bool, **shape) -> Eagle3Heads:
    sizes = {"attention_heads": 4, "key_value_heads": 2, "head_size": 8, **shape}
    heads = Eagle3Heads(
        Eagle3Shape(SIZE, VOCAB, 3, layers=LAYERS, intermediate_size=INNER, **sizes)
    )
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    return pruned(heads, TOKENS) if is_pruned else heads


def exported(heads, directory, dtype="float32"):
    layout = ExportLayout("owner/target", heads.shape, dtype=dtype)
    stub = TokenizerStub()
    write_export(directory, heads, layout, target=TARGET, tokenizer=stub, choices=TREE, card="")
    return directory


@pytest.mark.parametrize("is_pruned", [False, True])
def test_names_and_configuration_are_those_of_the_authors(tmp_path, is_pruned):
    heads = random_heads(is_pruned=is_pruned, norm_before_residual=False, rope_theta=500.0)
    directory = exported(heads, tmp_path / "export")
    found = load_file(directory / "model.safetensors")
    size = len(TOKENS) if is_pruned else VOCAB
    expected = SIZES | {"lm_head.weight": (size, SIZE)}
    if is_pruned:
        expected |= {"d2t": (size,), "t2d": (VOCAB,)}
        assert found["d2t"].tolist() == [0, 0, 3, 3, 13, 34], "id = row + d2t[row]"
        assert found["t2d"].nonzero()[:, 0].tolist() == TOKENS
        assert (found["d2t"].dtype, found["t2d"].dtype) == (torch.int64, torch.bool)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected
    content = json.loads((directory / "config.json").read_text())
    sizes = {"hidden_size": SIZE, "target_hidden_size": SIZE, "intermediate_size": INNER}
    vocabulary = {"vocab_size": VOCAB, "draft_vocab_size": size, "tie_word_embeddings": False}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "num_aux_hidden_states": 3}
    numbers = {"num_hidden_layers": 1, "rope_theta": 500.0, "norm_before_residual": False}
    assert content.items() >= (sizes | vocabulary | attention | layers | numbers).items()
    assert content["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4], "of SGLang"
    assert content["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (content["model_type"], content["speculators_model_type"]) == ("llama", "eagle3")


@pytest.mark.parametrize("is_pruned", [False, True])
def test_heads_come_back_as_torch_rounds_them(tmp_path, is_pruned):
    heads, model = random_heads(is_pruned=is_pruned), tiny_llama()
    directory = exported(heads, tmp_path / "export", "bfloat16")
    found = read_heads(directory, model)
    assert found.shape == heads.shape == read_layout(directory).shape
    heads.embedding.data.copy_(model.model.embed_tokens.weight)
    for name, parameter in heads.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter.bfloat16()), name
    if is_pruned:
        assert found.vocabulary.token_map.tolist() == TOKENS


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("d2t", torch.tensor([0, 0, 3, 3, 13, 33])),
        ("t2d", torch.ones(VOCAB, dtype=torch.bool)),
        ("t2d", torch.zeros(VOCAB, dtype=torch.int64)),
        ("d2t", torch.zeros(3, dtype=torch.int64)),
        ("d2t", None),
    ],
)
def test_a_draft_vocabulary_is_checked_both_ways(tmp_path, name, wrong):
    directory = exported(random_heads(is_pruned=True), tmp_path / "export")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = wrong
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(DataError, match=name):
        read_heads(directory, tiny_llama())


@pytest.mark.parametrize(
    ("architecture", "served"), [("Qwen3ForCausalLM", True), ("Gemma3ForCausalLM", False)]
)
def test_which_targets_vllm_serves_such_heads_with(architecture, served):
    shape = random_heads(is_pruned=True).shape
    reason = Eagle3Heads.vllm_refusal(shape, {"architectures": [architecture]})
    assert (reason is None) == served and (served or architecture in str(reason))
