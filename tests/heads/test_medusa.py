from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

from pipeline.errors import DataError
from pipeline.heads.kind import TargetWeights
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import EXPANDED, SHARED, MedusaShape

SIZE, VOCAB = 6, 11
LM_HEADS = ["untied", "shared", "tied"]


def random_heads(num_heads: int = 3, num_layers: int = 2, lm_head: str = "untied") -> MedusaHeads:
    generator = torch.Generator().manual_seed(0)
    shape = MedusaShape(SIZE, VOCAB, num_heads, num_layers, lm_head)
    heads = MedusaHeads(shape, dtype=torch.float64)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return heads


@pytest.mark.parametrize("kind", LM_HEADS)
def test_heads_start_as_the_target_and_leave_it_alone(kind: str):
    lm_head, hidden = torch.randn(VOCAB, SIZE), torch.randn(4, SIZE)
    before = lm_head.clone()
    target = TargetWeights(lambda: lm_head, lambda: lm_head)
    heads = MedusaHeads.initial(MedusaShape(SIZE, VOCAB, 3, 2, kind), target)
    torch.testing.assert_close(heads(hidden), linear(hidden, lm_head).expand(3, -1, -1))
    torch.testing.assert_close(heads(hidden, 2), heads(hidden)[:2])
    assert heads.lm_head.shape == ((3, VOCAB, SIZE) if kind == "untied" else (VOCAB, SIZE))
    if kind == "tied":
        assert heads.lm_head.data_ptr() == lm_head.data_ptr()
        assert not heads.lm_head.requires_grad
    else:
        assert heads.lm_head.requires_grad
        heads.lm_head.data += 1
    assert torch.equal(lm_head, before)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("kind", LM_HEADS)
def test_exported_tensors_are_those_that_engines_read(num_layers: int, kind: str):
    """By their names and shapes, and applied one head at a time."""
    heads, hidden = random_heads(3, num_layers, kind), torch.randn(4, SIZE, dtype=torch.float64)
    tensors = heads.named_tensors(EXPANDED)
    assert len(tensors) == 3 * (2 * num_layers + 1)
    for k, logits in enumerate(heads(hidden)):
        x = hidden
        for block in range(num_layers):
            name = f"{k}.{block}.linear"
            x = x + silu(linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
        torch.testing.assert_close(logits, linear(x, tensors[f"{k}.{num_layers}.weight"]))
    if kind != "untied":
        others = {f"{k}.{num_layers}.weight" for k in (1, 2)}
        assert heads.named_tensors(SHARED).keys() == tensors.keys() - others


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("1.0.linear.bias", None),
        ("1.0.linear.bias2", torch.zeros(1)),
        ("1.0.linear.bias", torch.zeros(SIZE + 1)),
        ("1.0.linear.bias", torch.full((SIZE,), torch.nan)),
    ],
)
def test_tensors_of_other_heads_are_refused_by_name(name: str, tensor):
    heads = random_heads()
    tensors = {key: value for key, value in heads.named_tensors().items() if key != name}
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(DataError, match=name):
        MedusaHeads.from_named_tensors(heads.shape, tensors, where="heads.safetensors")


@pytest.mark.parametrize("kind", ["shared", "tied"])
def test_heads_that_differ_are_not_read_as_one(kind: str):
    tensors = random_heads(lm_head=kind).named_tensors(EXPANDED)
    tensors["2.2.weight"] = tensors["2.2.weight"] + 1
    with pytest.raises(DataError, match=r"2\.2\.weight"):
        MedusaHeads.from_named_tensors(MedusaShape(SIZE, VOCAB, 3, 2, kind), tensors, EXPANDED)
