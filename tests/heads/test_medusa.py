from __future__ import annotations

from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu

from pipeline.errors import DataError
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import EXPANDED, SHARED, ExportFormat, MedusaShape

SIZE, VOCAB = 6, 11
LM_HEADS = ["untied", "shared", "tied"]
COMPACT = ["shared", "tied"]


def random_heads(num_heads: int = 3, num_layers: int = 2, lm_head: str = "untied") -> MedusaHeads:
    generator = torch.Generator().manual_seed(0)
    heads = MedusaHeads(
        MedusaShape(SIZE, VOCAB, num_heads, num_layers, lm_head), dtype=torch.float64
    )
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return heads


@pytest.mark.parametrize("kind", LM_HEADS)
def test_first_prediction_of_every_head_is_the_targets(kind: str):
    lm_head, hidden = torch.randn(VOCAB, SIZE), torch.randn(4, SIZE)
    heads = MedusaHeads.from_lm_head(MedusaShape(SIZE, VOCAB, 3, 2, kind), lm_head)
    torch.testing.assert_close(heads(hidden), linear(hidden, lm_head).expand(3, -1, -1))


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("kind", LM_HEADS)
def test_exported_tensors_applied_one_head_at_a_time_give_the_same_logits(
    num_layers: int, kind: str
):
    heads, hidden = random_heads(3, num_layers, kind), torch.randn(4, SIZE, dtype=torch.float64)
    tensors = heads.named_tensors(EXPANDED)
    for k, logits in enumerate(heads(hidden)):
        x = hidden
        for block in range(num_layers):
            x = x + silu(
                linear(
                    x, tensors[f"{k}.{block}.linear.weight"], tensors[f"{k}.{block}.linear.bias"]
                )
            )
        torch.testing.assert_close(logits, linear(x, tensors[f"{k}.{num_layers}.weight"]))


def test_only_the_heads_asked_for_are_evaluated():
    heads, hidden = random_heads(), torch.randn(4, SIZE, dtype=torch.float64)
    torch.testing.assert_close(heads(hidden, 2), heads(hidden)[:2])
    assert heads.hidden(hidden, 1).shape == (1, 4, SIZE)


def test_tied_heads_share_the_lm_head_and_never_train_it():
    lm_head = torch.randn(VOCAB, SIZE)
    heads = MedusaHeads.from_lm_head(MedusaShape(SIZE, VOCAB, 3, 1, lm_head="tied"), lm_head)
    assert heads.lm_head.data_ptr() == lm_head.data_ptr()
    trained = {name for name, parameter in heads.named_parameters() if parameter.requires_grad}
    assert trained == {"block_weight", "block_bias"}


@pytest.mark.parametrize(
    ("kind", "shape"), [("untied", (3, VOCAB, SIZE)), ("shared", (VOCAB, SIZE))]
)
def test_heads_that_train_lm_heads_leave_the_targets_alone(kind: str, shape: tuple[int, ...]):
    lm_head = torch.randn(VOCAB, SIZE)
    before = lm_head.clone()
    heads = MedusaHeads.from_lm_head(MedusaShape(SIZE, VOCAB, 3, lm_head=kind), lm_head)
    assert heads.lm_head.shape == shape and heads.lm_head.requires_grad
    heads.lm_head.data += 1
    assert torch.equal(lm_head, before)


def test_an_lm_head_by_another_name_is_refused():
    with pytest.raises(ValueError):
        MedusaShape(SIZE, VOCAB, 3, lm_head="twisted")


@pytest.mark.parametrize(
    ("kind", "format"), [*product(LM_HEADS, (None, EXPANDED)), *product(COMPACT, (SHARED,))]
)
def test_heads_survive_a_safetensors_file(tmp_path, kind: str, format: ExportFormat | None):
    heads = random_heads(3, 2, kind)
    tensors = heads.named_tensors(format)
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "heads.safetensors"
    )
    stored = load_file(tmp_path / "heads.safetensors")
    read = MedusaHeads.from_named_tensors(heads.shape, stored, format)
    for name, parameter in heads.named_parameters():
        assert torch.equal(read.get_parameter(name), parameter), name
        assert read.get_parameter(name).requires_grad == parameter.requires_grad


@pytest.mark.parametrize(
    ("kind", "expand", "num_stored"),
    [*((kind, True, 3) for kind in LM_HEADS), *((kind, False, 1) for kind in COMPACT)],
)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_names_and_shapes_are_those_that_the_engines_read(
    kind: str, expand: bool, num_stored: int, num_layers: int
):
    tensors = random_heads(3, num_layers, kind).named_tensors(EXPANDED if expand else SHARED)
    expected = {f"{k}.{i}.linear.weight": (SIZE, SIZE) for k in range(3) for i in range(num_layers)}
    expected |= {f"{k}.{i}.linear.bias": (SIZE,) for k in range(3) for i in range(num_layers)}
    expected |= {f"{k}.{num_layers}.weight": (VOCAB, SIZE) for k in range(num_stored)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected


@pytest.mark.parametrize("kind", LM_HEADS)
def test_naming_the_tensors_copies_none_of_them(kind: str):
    heads = random_heads(3, 2, kind)
    stores = {parameter.untyped_storage().data_ptr() for parameter in heads.parameters()}
    assert {
        tensor.untyped_storage().data_ptr() for tensor in heads.named_tensors(EXPANDED).values()
    } == stores


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape"])
def test_tensors_of_other_heads_are_refused_by_name(damage: str):
    heads = random_heads()
    tensors = heads.named_tensors()
    if damage == "missing":
        del tensors["1.0.linear.bias"]
    elif damage == "unknown":
        tensors["1.0.linear.bias2"] = torch.zeros(1)
    else:
        tensors["1.0.linear.bias"] = torch.zeros(SIZE + 1)
    with pytest.raises(DataError, match=r"1\.0\.linear\.bias"):
        MedusaHeads.from_named_tensors(heads.shape, tensors, where="heads.safetensors")


@pytest.mark.parametrize("kind", COMPACT)
def test_heads_that_differ_are_not_read_as_one(kind: str):
    tensors = random_heads(lm_head=kind).named_tensors(EXPANDED)
    tensors["2.2.weight"] = tensors["2.2.weight"] + 1
    with pytest.raises(DataError, match="differ"):
        MedusaHeads.from_named_tensors(MedusaShape(SIZE, VOCAB, 3, 2, kind), tensors, EXPANDED)


def test_lm_head_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="lm_head"):
        MedusaHeads.from_lm_head(MedusaShape(SIZE, VOCAB, 2), torch.zeros(VOCAB + 1, SIZE))
