"""Heads of other trainers: every layout gives the same guesses, and what is not known is refused
with its reason.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipeline.errors import DataError
from pipeline.export.weights import DirectoryTensors
from pipeline.heads.foreign import Sizes, foreign_heads
from pipeline.heads.kind import TargetWeights
from pipeline.heads.recurrent import RecurrentHeads
from pipeline.heads.shapes import EXPANDED, Eagle3Shape, RecurrentShape
from tests.export.exports import config_of, heads_of, tensors_of

SIZES = Sizes(4, 6, 8)
FIRST, SQUARE = "0.0.linear.weight", torch.ones(4, 4)
TARGET = TargetWeights(
    lambda: torch.arange(24.0).reshape(6, 4) / 24,
    lambda: torch.arange(24.0).reshape(6, 4).flip(0) / 24,
)


def read(directory, sizes=SIZES, num_tokens=3):
    return foreign_heads(DirectoryTensors(directory), TARGET, sizes, num_tokens)


def save(tensors, directory, name="model.safetensors"):
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, directory / name)


def pickled(tensors, directory):
    torch.save(tensors, directory / "medusa_lm_head.pt")


def inside_of_a_model(tensors, directory):
    inside = [(f"medusa_head.{name}", tensor) for name, tensor in tensors.items()]
    own = {"model.embed_tokens.weight": torch.ones(6, 4)}
    save(own | dict(inside[:3]), directory, "model-00001-of-00002.safetensors")
    save(dict(inside[3:]), directory, "model-00002-of-00002.safetensors")


def as_vllm_names_them(tensors, directory):
    named = {}
    for name, tensor in tensors.items():
        k, place, *rest = name.split(".")
        block = f"blocks.{k}.layers.{place}.{rest[-1]}"
        named[block if int(place) < 2 else f"lm_heads.{k}.weight"] = tensor
    save(named, directory)


def assert_guesses(directory, heads):
    found, hidden_ND = read(directory).heads, torch.randn(7, 4)
    assert found and found.shape.num_heads == 3
    torch.testing.assert_close(found(hidden_ND), heads(hidden_ND))


@pytest.mark.parametrize("write", [save, pickled, inside_of_a_model, as_vllm_names_them])
def test_medusa_heads_guess_the_same_from_every_layout(tmp_path, write):
    heads = heads_of(config_of(num_layers=2))
    write(tensors_of(heads), tmp_path)
    assert_guesses(tmp_path, heads)


@pytest.mark.parametrize("missing", [("1.1.weight", "2.1.weight"), ("1.weight", "bias")])
def test_a_missing_lm_head_is_the_first_or_the_targets(tmp_path, missing):
    heads = heads_of(config_of(lm_head="tied"))
    heads.block_bias.data.zero_()
    heads.lm_head.data.copy_(TARGET.lm_head())
    named = tensors_of(heads)
    save({name: named[name] for name in named if not name.endswith(missing)}, tmp_path)
    assert_guesses(tmp_path, heads)


def eagle(directory, epsilon=1e-5, **changed):
    """An EAGLE-1 container made by hand: two query heads of size 2 and no embedding."""
    torch.manual_seed(0)
    tensors = {
        "fc.weight": torch.randn(4, 8),
        "layers.0.mlp.gate_proj.weight": torch.randn(5, 4),
        "layers.0.mlp.up_proj.weight": torch.randn(5, 4),
        "layers.0.mlp.down_proj.weight": torch.randn(4, 5),
        "layers.0.post_attention_layernorm.weight": torch.rand(4),
        **{f"layers.0.self_attn.{name}_proj.weight": torch.randn(4, 4) for name in "qkv"},
        "layers.0.self_attn.o_proj.weight": torch.zeros(4, 4),
    }
    tensors = {name: tensor for name, tensor in (tensors | changed).items() if tensor is not None}
    save_file(tensors, directory / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": epsilon}
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize(
    "repeated",
    [{}, {"embed_tokens.weight": TARGET.embedding().clone(), "fc.bias": torch.zeros(4)}],
)
def test_an_eagle_container_without_attention_is_a_recurrent_cell(tmp_path, repeated):
    """Computed here from the files' names, with the RMSNorm of their config.json."""
    named = eagle(tmp_path, epsilon=0.1, **repeated)
    found = read(tmp_path)
    assert found.heads and found.heads.shape == RecurrentShape(
        4, 6, 3, intermediate_size=5, norm_eps=0.1
    )
    tokens_N, hidden_ND = torch.tensor([0, 5, 2]), torch.randn(3, 4)
    z_ND = torch.cat([TARGET.embedding()[tokens_N], hidden_ND], 1) @ named["fc.weight"].T
    norm = named["layers.0.post_attention_layernorm.weight"]
    x_ND = z_ND * torch.rsqrt(z_ND.pow(2).mean(-1, keepdim=True) + 0.1) * norm
    gate, up, down = (named[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    expected_ND = z_ND + (nn.functional.silu(x_ND @ gate.T) * (x_ND @ up.T)) @ down.T
    assert isinstance(found.heads, RecurrentHeads)
    torch.testing.assert_close(found.heads.step(hidden_ND, tokens_N), expected_ND)
    assert torch.equal(found.heads.lm_head, TARGET.lm_head()), "it is the target's"


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("layers.0.self_attn.o_proj.weight", torch.ones(4, 4)), ("fc.bias", torch.ones(4))],
)
def test_a_draft_model_with_attention_is_left_to_vllm(tmp_path, name, tensor):
    eagle(tmp_path, **{name: tensor})
    found = read(tmp_path)
    assert found.heads is None and "is not zero" in found.why_not
    assert found.vllm_method == "eagle"


def medusa(directory):
    save(tensors_of(heads_of(config_of())), directory)


@pytest.mark.parametrize(
    ("write", "sizes"),
    [
        (lambda path: save({"a.b": torch.ones(2)}, path), SIZES),
        (lambda path: save({FIRST: SQUARE, "2.0.linear.weight": SQUARE}, path), SIZES),
        (medusa, Sizes(8, 6, 8)),
        (eagle, Sizes(8, 6, 8)),
        (lambda path: None, SIZES),
        (lambda path: (path / "x.pt").write_bytes(b"cos\nsystem\n."), SIZES),
    ],
)
def test_other_files_and_heads_of_other_targets_are_refused(tmp_path, write, sizes):
    write(tmp_path)
    with pytest.raises(DataError) as caught:
        read(tmp_path, sizes)
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)


def test_a_cell_of_another_activation_is_refused(tmp_path):
    eagle(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(DataError, match="gelu"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("layers.0.mlp.up_proj.weight", None),
        ("layers.1.mlp.up_proj.weight", torch.ones(5, 4)),
        ("embed_tokens.weight", torch.ones(6, 4)),  # not the target's
    ],
)
def test_tensors_that_are_no_cell_are_refused(tmp_path, name, tensor):
    eagle(tmp_path, **{name: tensor})
    with pytest.raises(DataError, match=name.removeprefix("layers.")):
        read(tmp_path)


EAGLE3_TARGET = TargetWeights(lambda: torch.randn(9, 4), lambda: torch.arange(36.0).view(9, 4))
EAGLE3_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 4,
    "intermediate_size": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 9,
    "draft_vocab_size": 3,
}


def eagle3(directory, prefix="midlayer", config=EAGLE3_CONFIG, **changed):
    """An EAGLE-3 model made by hand, which drafts tokens 1, 4 and 8; layers 2, 4 and 5 of 8."""
    torch.manual_seed(0)
    attention = {"q": (4, 8), "k": (2, 8), "v": (2, 8), "o": (4, 4)}
    tensors = {
        "fc.weight": torch.randn(4, 12),
        "norm.weight": torch.rand(4),
        "lm_head.weight": torch.randn(3, 4),
        "d2t": torch.tensor([1, 3, 6]),
        "t2d": torch.tensor([False, True, False, False, True, False, False, False, True]),
        **{f"{prefix}.self_attn.{x}_proj.weight": torch.randn(attention[x]) for x in attention},
        f"{prefix}.mlp.gate_proj.weight": torch.randn(5, 4),
        f"{prefix}.mlp.up_proj.weight": torch.randn(5, 4),
        f"{prefix}.mlp.down_proj.weight": torch.randn(4, 5),
        f"{prefix}.hidden_norm.weight": torch.rand(4),
        f"{prefix}.input_layernorm.weight": torch.rand(4),
        f"{prefix}.post_attention_layernorm.weight": torch.rand(4),
    }
    tensors = {name: tensor for name, tensor in (tensors | changed).items() if tensor is not None}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


def read_eagle3(directory):
    return foreign_heads(DirectoryTensors(directory), EAGLE3_TARGET, Sizes(4, 9, 8), 3)


SPECULATORS = {
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 3,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 8],
    "transformer_layer_config": {
        **{name: each for name, each in EAGLE3_CONFIG.items() if name != "draft_vocab_size"},
        "head_dim": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}
BY_NVIDIA = {**EAGLE3_CONFIG, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 7]}}


@pytest.mark.parametrize(
    ("prefix", "config", "layers", "theta", "norm_before_residual", "dropped"),
    [
        ("midlayer", EAGLE3_CONFIG, (2, 4, 5), 10_000.0, False, "t2d"),
        ("midlayer", BY_NVIDIA, (1, 3, 8), 10_000.0, False, None),
        ("layers.0", SPECULATORS, (1, 3, 8), 500.0, True, None),
    ],
)
def test_an_eagle3_model_is_one_layer_that_reads_rows(
    tmp_path, prefix, config, layers, theta, norm_before_residual, dropped
):
    named = eagle3(tmp_path, prefix, config, **({dropped: None} if dropped else {}))
    found = read_eagle3(tmp_path)
    assert found.heads and found.vllm_method == "eagle3"
    assert found.heads.shape == Eagle3Shape(
        4,
        3,
        3,
        target_vocab_size=9,
        layers=layers,
        intermediate_size=5,
        attention_heads=2,
        key_value_heads=1,
        head_size=2,
        norm_eps=1e-5,
        rope_theta=theta,
        norm_before_residual=norm_before_residual,
    )
    assert found.heads.vocabulary.token_map.tolist() == [1, 4, 8]
    assert torch.equal(found.heads.embedding, EAGLE3_TARGET.embedding())
    for name, tensor in found.heads.named_tensors(EXPANDED).items():
        assert torch.equal(named[name.replace("layers.0", prefix)], tensor), name


def test_an_eagle3_model_may_draft_all_tokens(tmp_path):
    """SpecForge then stores a map that maps nothing."""
    matrix, everything = torch.randn(9, 4), torch.ones(9, dtype=torch.bool)
    nothing = torch.zeros(9, dtype=torch.int64)
    eagle3(tmp_path, **{"lm_head.weight": matrix, "d2t": nothing, "t2d": everything})
    found = read_eagle3(tmp_path).heads
    assert found and not found.shape.is_pruned and torch.equal(found.lm_head, matrix)


@pytest.mark.parametrize(
    ("changed", "settings", "said"),
    [
        ({"midlayer.self_attn.q_proj.bias": torch.ones(4)}, {}, "q_proj.bias"),
        ({"layers.1.hidden_norm.weight": torch.ones(4)}, {}, "layers.1"),
        ({"embed_tokens.weight": torch.ones(9, 4)}, {}, "embedding of its own"),
        ({}, {"norm_output": True}, "norm_output"),
        ({}, {"eagle_config": {"norm_before_fc": True}}, "norm_before_fc"),
        ({}, {"target_hidden_size": 8}, "target_hidden_size 8"),
        ({}, {"rope_scaling": {"rope_type": "llama3"}}, "rotary"),
    ],
)
def test_an_eagle3_model_of_another_form_is_left_to_vllm(tmp_path, changed, settings, said):
    eagle3(tmp_path, config=EAGLE3_CONFIG | settings, **changed)
    found = read_eagle3(tmp_path)
    assert found.heads is None and said in found.why_not and found.vllm_method == "eagle3"


@pytest.mark.parametrize(
    ("changed", "left_out", "said"),
    [
        ({"t2d": torch.ones(9, dtype=torch.bool)}, None, "d2t and t2d"),
        ({"d2t": torch.tensor([1, 3, 7]), "t2d": None}, None, "d2t and t2d"),
        ({"norm.weight": None}, None, "norm.weight is missing"),
        ({"fc.weight": torch.ones(4, 8)}, None, "fc.weight has shape"),
        ({}, "num_attention_heads", "num_attention_heads"),
    ],
)
def test_a_damaged_eagle3_model_is_refused(tmp_path, changed, left_out, said):
    config = {name: each for name, each in EAGLE3_CONFIG.items() if name != left_out}
    eagle3(tmp_path, config=config, **changed)
    with pytest.raises(DataError, match=said):
        read_eagle3(tmp_path)
