from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from pipeline.artifacts.trained_heads import read_summary, read_trained_heads, write_heads
from pipeline.errors import DataError
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape


@pytest.mark.parametrize("lm_head", ["untied", "shared", "tied"])
def test_trained_heads_come_back_with_their_summary(tmp_path, lm_head):
    heads = MedusaHeads(MedusaShape(8, 12, 3, 2, lm_head))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    path = tmp_path / "heads.safetensors"
    assert read_summary(path, heads.shape) is None
    write_heads(path, heads, {"steps": 7})
    found = read_trained_heads(path)
    assert read_summary(path, heads.shape) == {"steps": 7} and found.shape == heads.shape
    for name, tensor in heads.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def test_damaged_and_foreign_files_are_no_trained_heads(tmp_path):
    path = tmp_path / "heads.safetensors"
    write_heads(path, MedusaHeads(MedusaShape(8, 12, 3)), {})
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match="damaged"):
        read_trained_heads(path)
    save_file({"0.0.linear.weight": torch.zeros(8, 8)}, path)
    assert read_summary(path, MedusaShape(8, 12, 3)) is None
    with pytest.raises(DataError, match="no trained heads"):
        read_trained_heads(path)


def test_heads_with_a_non_finite_number_are_refused(tmp_path):
    heads = MedusaHeads(MedusaShape(8, 12, 3))
    heads.lm_head.data[2, 5, 1] = torch.nan
    write_heads(tmp_path / "heads.safetensors", heads, {})
    with pytest.raises(DataError, match="not finite"):
        read_trained_heads(tmp_path / "heads.safetensors")
