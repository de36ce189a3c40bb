"""Several formats in one export: each is a whole directory of its own, in the form that its engine
reads.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from pipeline.errors import ConfigError, DataError
from pipeline.export.layout import check_formats
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.recurrent import RecurrentHeads
from pipeline.heads.shapes import MedusaShape, RecurrentShape
from tests.export.exports import config_of, heads_of, holds, read, write


@pytest.mark.parametrize("root", ["expanded", "shared"])
def test_each_format_is_a_whole_directory_with_the_same_heads(tmp_path, root):
    layout = config_of(lm_head="shared", format=root)
    others = [name for name in ("expanded", "shared", "reference") if name != root]
    heads = heads_of(layout)
    export = write(tmp_path / "export", layout, heads, further=others)
    assert holds(export, layout, heads)
    assert {path.name for path in export.iterdir() if path.is_dir()} == set(others)
    for name in others:
        assert holds(export / name, replace(layout, format=name), heads)
        kept = {path.name for path in (export / name).iterdir()}
        weights = "medusa_lm_head.pt" if name == "reference" else "medusa_lm_head.safetensors"
        assert kept == {"config.json", "medusa_choices.json", "tokenizer.json", weights}


def test_the_reference_implementation_loads_its_file_without_running_code(tmp_path):
    """Its heads, written out here: a block and an lm_head each; `from_pretrained` reads the same
    names.
    """
    layout = config_of(lm_head="untied")
    heads = heads_of(layout)
    directory = write(tmp_path / "export", layout, heads, further=["reference"]) / "reference"

    class ResBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return x + nn.functional.silu(self.linear(x))

    def head():
        return nn.Sequential(ResBlock(), nn.Linear(4, 6, bias=False))

    theirs = nn.ModuleList([head(), head(), head()])
    weights = torch.load(directory / "medusa_lm_head.pt", weights_only=True)
    theirs.load_state_dict(weights, strict=True)
    hidden_ND = torch.randn(5, 4)
    torch.testing.assert_close(torch.stack([head(hidden_ND) for head in theirs]), heads(hidden_ND))
    config = json.loads((directory / "config.json").read_text())
    wanted = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    assert config.items() >= wanted.items() and "speculators_config" not in config


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (MedusaShape(4, 6, 3), ["reference"]),
        (MedusaShape(4, 6, 3, num_layers=2), ["expanded", "reference"]),
        (RecurrentShape(4, 6, 3), ["expanded", "reference"]),
    ],
)
def test_a_format_that_its_engine_would_not_load_is_refused(shape, names):
    kind = MedusaHeads if isinstance(shape, MedusaShape) else RecurrentHeads
    with pytest.raises(ConfigError) as caught:
        check_formats(kind, shape, names)
    assert caught.value.where == "export.formats"


class Harmful:
    """A pickle of this creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def pickled(tmp_path):
    """The pickle of an export in the reference's format."""
    directory = write(tmp_path / "export", config_of(), further=["reference"])
    return directory / "reference" / "medusa_lm_head.pt"


def test_a_pickle_of_code_is_refused_without_running(tmp_path, pickled):
    torch.save({"0.0.linear.weight": Harmful(str(tmp_path / "harm"))}, pickled)
    with pytest.raises(DataError):
        read(pickled.parent)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("content", [[torch.ones(1)], {"a": 1}, {1: torch.ones(1)}])
def test_a_pickle_of_anything_but_named_tensors_is_refused(pickled, content):
    torch.save(content, pickled)
    with pytest.raises(DataError):
        read(pickled.parent)
