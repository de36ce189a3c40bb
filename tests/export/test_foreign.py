"""Heads of other trainers: every layout gives the same guesses, and what is not known is refused
with its reason.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.errors import DataError
from pipeline.export.weights import DirectoryTensors
from pipeline.heads.kind import TargetWeights
from pipeline.heads.kinds import ForeignHeads, Sizes, foreign_heads
from pipeline.heads.recurrent import RecurrentHeads
from pipeline.heads.shapes import MedusaShape, RecurrentShape
from tests.export.exports import config_of, heads_of, tensors_of

SIZES, ONE = Sizes(4, 6), torch.tensor(1.0)
TARGET = TargetWeights(
    lambda: torch.arange(24.0).reshape(6, 4) / 24,
    lambda: torch.arange(24.0).reshape(6, 4).flip(0) / 24,
)


def read(directory: Path, sizes: Sizes = SIZES, num_tokens: int = 3) -> ForeignHeads:
    return foreign_heads(DirectoryTensors(directory), TARGET, sizes, num_tokens)


def as_vllm_names_them(tensors: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    names = {}
    for name, tensor in tensors.items():
        k, place, *rest = name.split(".")
        block = f"blocks.{k}.layers.{place}.{rest[-1]}"
        names[block if int(place) < num_layers else f"lm_heads.{k}.weight"] = tensor.clone()
    return names


def authors(tensors: dict[str, Tensor], directory: Path) -> None:
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()},
        directory / "medusa_lm_head.safetensors",
    )


def pickled(tensors: dict[str, Tensor], directory: Path) -> None:
    torch.save(tensors, directory / "medusa_lm_head.pt")


def inside_of_a_model(tensors: dict[str, Tensor], directory: Path) -> None:
    inside = {f"medusa_head.{name}": tensor.clone() for name, tensor in tensors.items()}
    some, others = dict(list(inside.items())[:3]), dict(list(inside.items())[3:])
    save_file(
        some | {"model.embed_tokens.weight": torch.ones(6, 4)},
        directory / "model-00001-of-00002.safetensors",
    )
    save_file(
        others | {"lm_head.weight": torch.ones(6, 4)},
        directory / "model-00002-of-00002.safetensors",
    )


def vllm_s_own(tensors: dict[str, Tensor], directory: Path) -> None:
    save_file(as_vllm_names_them(tensors, 2), directory / "model.safetensors")


def told(directory: Path, **config: object) -> None:
    eagle(directory)
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("write", [authors, pickled, inside_of_a_model, vllm_s_own])
def test_medusa_heads_guess_the_same_from_every_layout(tmp_path, write):
    heads = heads_of(config_of(num_layers=2))
    write(tensors_of(heads), tmp_path)
    found, hidden_ND = read(tmp_path), torch.randn(7, 4)
    assert found.heads and found.heads.shape == MedusaShape(4, 6, 3, 2)
    assert torch.equal(found.heads(hidden_ND), heads(hidden_ND))


def test_a_pickle_beside_safetensors_is_not_read(tmp_path):
    heads, others = heads_of(config_of()), heads_of(config_of(), seed=1)
    authors(tensors_of(heads), tmp_path)
    torch.save(tensors_of(others), tmp_path / "pytorch_model.bin")
    found, hidden_ND = read(tmp_path), torch.randn(7, 4)
    assert found.heads and torch.equal(found.heads(hidden_ND), heads(hidden_ND))


def test_heads_without_an_lm_head_read_the_target_s_and_those_without_biases_have_none(tmp_path):
    heads = heads_of(config_of(lm_head="tied"))
    heads.block_bias.data.zero_()
    tensors = {
        name: tensor for name, tensor in tensors_of(heads).items() if name.endswith("linear.weight")
    }
    authors(tensors, tmp_path)
    heads.lm_head.data.copy_(TARGET.lm_head())
    found, hidden_ND = read(tmp_path), torch.randn(7, 4)
    assert found.heads and torch.allclose(found.heads(hidden_ND), heads(hidden_ND))


def test_one_lm_head_in_the_file_is_for_all_heads(tmp_path):
    heads = heads_of(config_of(lm_head="shared"))
    named = tensors_of(heads)
    authors(
        {
            name: tensor
            for name, tensor in named.items()
            if name not in ("1.1.weight", "2.1.weight")
        },
        tmp_path,
    )
    found, hidden_ND = read(tmp_path), torch.randn(7, 4)
    assert found.heads and torch.equal(found.heads(hidden_ND), heads(hidden_ND))


def eagle(directory: Path, epsilon: float = 1e-5, **changed: Tensor | None) -> dict[str, Tensor]:
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
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "rms_norm_eps": epsilon,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


def test_an_eagle_container_without_attention_is_a_recurrent_cell(tmp_path):
    """Computed here from the files' names, with the RMSNorm of their config.json."""
    named = eagle(tmp_path, epsilon=0.1)
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


def test_a_container_may_repeat_the_target_s_matrices_and_bring_a_bias_of_zeros(tmp_path):
    repeated = {"embed_tokens.weight": TARGET.embedding().clone(), "fc.bias": torch.zeros(4)}
    eagle(tmp_path, **repeated)
    assert isinstance(read(tmp_path).heads, RecurrentHeads)
    eagle(tmp_path, **{"embed_tokens.weight": torch.ones(6, 4)})
    with pytest.raises(DataError, match=r"embed_tokens\.weight is not the target's"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"layers.0.self_attn.o_proj.weight": torch.ones(4, 4)}, "EAGLE-1 model with attention"),
        ({"fc.bias": torch.ones(4)}, "fc adds a bias"),
    ],
)
def test_a_draft_model_that_native_decoding_cannot_have_is_left_to_vllm_with_the_reason(
    tmp_path, changed, says
):
    eagle(tmp_path, **changed)
    found = read(tmp_path)
    assert (
        found.heads is None
        and found.as_they_are
        and says in found.why_not
        and found.vllm_method == "eagle"
    )


@pytest.mark.parametrize(
    ("write", "sizes", "says"),
    [
        (
            lambda path: authors(tensors_of(heads_of(config_of())), path),
            Sizes(8, 6),
            "states of 4 numbers.*have 8",
        ),
        (
            lambda path: authors(tensors_of(heads_of(config_of())), path),
            Sizes(4, 7),
            "vocabulary of 6.*lm_head has 7",
        ),
        (eagle, Sizes(8, 6), "states of 4 numbers.*have 8"),
        (lambda path: None, SIZES, "no weights"),
        (
            lambda path: save_file({"a.b": torch.ones(2)}, path / "model.safetensors"),
            SIZES,
            "neither.*there is a.b",
        ),
        (
            lambda path: torch.save({"0.0.linear.weight": 3}, path / "x.pt"),
            SIZES,
            "no file of named tensors",
        ),
        (
            lambda path: (path / "x.pt").write_bytes(b"cos\nsystem\n."),
            SIZES,
            "no file of tensors|cannot be read",
        ),
        (
            lambda path: eagle(path, **{"layers.0.mlp.up_proj.weight": None}),
            SIZES,
            "up_proj.weight is missing",
        ),
        (
            lambda path: eagle(path, **{"layers.1.mlp.up_proj.weight": torch.ones(5, 4)}),
            SIZES,
            "unknown",
        ),
        (
            lambda path: eagle(path, **{"fc.weight": torch.ones(4, 12)}),
            SIZES,
            r"\[4, 12\].*\[D, 2D\]",
        ),
        (
            lambda path: authors({"0.0.linear.weight": torch.full((4, 4), torch.nan)}, path),
            SIZES,
            "not finite",
        ),
        (
            lambda path: authors({"999999999.0.linear.weight": torch.ones(4, 4)}, path),
            SIZES,
            "of 1000000000 heads",
        ),
        (
            lambda path: authors({"0.0.linear.weight": torch.ones(4, 4), "0.1.weight": ONE}, path),
            SIZES,
            "0.1.weight",
        ),
        (
            lambda path: eagle(path, **{"layers.0.mlp.gate_proj.weight": ONE}),
            SIZES,
            "gate_proj.weight",
        ),
        (
            lambda path: eagle(path, **{"fc.weight": torch.ones(4, 8).double()}),
            SIZES,
            "fc.weight is float64",
        ),
        (lambda path: told(path, rms_norm_eps=None), SIZES, "rms_norm_eps is no number but None"),
    ],
)
def test_what_is_no_heads_of_this_target_is_refused_in_a_paragraph(tmp_path, write, sizes, says):
    write(tmp_path)
    with pytest.raises(DataError, match=says) as caught:
        read(tmp_path, sizes)
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)


def test_what_files_leave_out_does_not_widen_what_they_hold(tmp_path):
    """Zeros of a cell's attention and of biases: in float32 heads of 16 bits would be slower than
    they are.
    """
    eagle(tmp_path, **{name: tensor.bfloat16() for name, tensor in eagle(tmp_path).items()})
    cell = read(tmp_path).heads
    assert isinstance(cell, RecurrentHeads) and cell.fc.dtype == torch.bfloat16
    (tmp_path / "medusa").mkdir()
    named = {
        name: tensor.bfloat16()
        for name, tensor in tensors_of(heads_of(config_of())).items()
        if "bias" not in name
    }
    authors(named, tmp_path / "medusa")
    found = read(tmp_path / "medusa").heads
    assert found and {parameter.dtype for parameter in found.parameters()} == {torch.bfloat16}
