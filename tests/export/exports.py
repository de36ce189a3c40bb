"""Small random heads, and exports of them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from pipeline.export.directory import read_heads, write_export
from pipeline.export.layout import ExportLayout, read_layout
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape

TREE = [[0], [1], [0, 0], [0, 1]]
TARGET = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4}
LM_HEAD_AND_FORMAT = [
    ("untied", "expanded"),
    ("shared", "expanded"),
    ("tied", "expanded"),
    ("shared", "shared"),
    ("tied", "shared"),
]


class TokenizerStub:
    def __init__(self, text="{}"):
        self.text = text

    def save_pretrained(self, directory):
        Path(directory, "tokenizer.json").write_text(self.text)


def config_of(base_model="owner/target", format="expanded", dtype="float32", **shape):
    usual = {"hidden_size": 4, "vocab_size": 6, "num_heads": 3}
    return ExportLayout(base_model, MedusaShape(**usual | shape), format, dtype)


def heads_of(config, seed=0):
    """Random heads."""
    draw = torch.Generator().manual_seed(seed)
    heads = MedusaHeads(config.shape)
    for parameter in heads.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=draw))
    return heads


def tensors_of(heads):
    """Every head's tensors under the names of FACTS' table, written out here once more; one lm_head
    K times.
    """
    tensors = {}
    for k in range(heads.shape.num_heads):
        for layer in range(heads.shape.num_layers):
            tensors[f"{k}.{layer}.linear.weight"] = heads.block_weight.data[layer, k]
            tensors[f"{k}.{layer}.linear.bias"] = heads.block_bias.data[layer, k]
        tensors[f"{k}.{heads.shape.num_layers}.weight"] = (
            heads.lm_head.data[k] if heads.shape.lm_head == "untied" else heads.lm_head.data
        )
    return tensors


def write(directory, config, heads=None, **changes):
    """Write an export; by default of random heads."""
    usual = {"target": TARGET, "tokenizer": TokenizerStub(), "choices": TREE, "card": "card"}
    write_export(directory, heads or heads_of(config), config, **usual | changes)
    return directory


def weights_of(directory):
    return load_file(directory / "medusa_lm_head.safetensors")


def read(directory):
    """The heads of an export, which take nothing from their target."""
    return read_heads(directory, None)


def holds(directory, config, heads):
    """Whether an export, read back, is these heads bit for bit."""
    found = read(directory)
    same = all(
        torch.equal(found.get_parameter(name), each) for name, each in heads.named_parameters()
    )
    return read_layout(directory) == config and found.shape == heads.shape and same
