"""Two formats in one export: each is a whole directory of its own. Pickles run no code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pipeline.errors import DataError
from pipeline.export.weights import WeightsFile
from tests.export.exports import config_of, heads_of, holds, write


@pytest.mark.parametrize(("root", "other"), [("expanded", "shared"), ("shared", "expanded")])
def test_each_format_is_a_whole_directory_with_the_same_heads(tmp_path, root, other):
    layout = config_of(lm_head="shared", format=root)
    heads = heads_of(layout)
    export = write(tmp_path / "export", layout, heads, further=[other])
    assert holds(export, layout, heads) and holds(
        export / other, replace(layout, format=other), heads
    )
    weights = "medusa_lm_head.safetensors"
    kept = {path.name for path in (export / other).iterdir()}
    assert kept == {"config.json", "medusa_choices.json", "tokenizer.json", weights}


def test_the_reference_implementation_computes_the_same(tmp_path):
    """Its heads, written out here: a block and an lm_head each."""
    layout = config_of(lm_head="untied")
    heads = heads_of(layout)
    directory = write(tmp_path / "export", layout, heads)

    class ResBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return x + nn.functional.silu(self.linear(x))

    def head():
        return nn.Sequential(ResBlock(), nn.Linear(4, 6, bias=False))

    theirs = nn.ModuleList([head(), head(), head()])
    theirs.load_state_dict(load_file(directory / "medusa_lm_head.safetensors"), strict=True)
    hidden_ND = torch.randn(5, 4)
    torch.testing.assert_close(torch.stack([head(hidden_ND) for head in theirs]), heads(hidden_ND))


class Harmful:
    """A pickle of this creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_pickle_of_code_is_refused_without_running(tmp_path):
    torch.save({"0.0.linear.weight": Harmful(str(tmp_path / "harm"))}, tmp_path / "heads.pt")
    with pytest.raises(DataError):
        WeightsFile(tmp_path / "heads.pt")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("content", [[torch.ones(1)], {"a": 1}, {1: torch.ones(1)}])
def test_a_pickle_of_anything_but_named_tensors_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "heads.pt")
    with pytest.raises(DataError):
        WeightsFile(tmp_path / "heads.pt")
