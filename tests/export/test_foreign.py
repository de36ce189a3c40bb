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
from pipeline.heads.kind import TargetWeights
from pipeline.heads.kinds import Sizes, foreign_heads
from pipeline.heads.recurrent import RecurrentHeads
from pipeline.heads.shapes import RecurrentShape
from tests.export.exports import config_of, heads_of, tensors_of

SIZES = Sizes(4, 6)
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
        (medusa, Sizes(8, 6)),
        (eagle, Sizes(8, 6)),
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
