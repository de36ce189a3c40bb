"""Small random heads, and exports of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from pipeline.export.directory import read_export, write_export
from pipeline.export.layout import ExportConfig

TREE = [[0], [1], [0, 0], [0, 1]]
TIED_AND_FORMAT = [(False, "expanded"), (True, "expanded"), (True, "shared")]


class TokenizerStub:
    def __init__(self, text: str = "{}"):
        self.text = text

    def save_pretrained(self, directory: str) -> None:
        Path(directory, "tokenizer.json").write_text(self.text)


def config_of(**changes) -> ExportConfig:
    return replace(ExportConfig("owner/target", hidden_size=4, vocab_size=6, num_heads=3, num_layers=1), **changes)


def heads_of(config: ExportConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random heads under the names of FACTS' table, written out here once more."""
    draw = torch.Generator().manual_seed(seed)
    shared = torch.randn(config.vocab_size, config.hidden_size, generator=draw)
    tensors = {}
    for k in range(config.num_heads):
        for layer in range(config.num_layers):
            size = config.hidden_size
            tensors[f"{k}.{layer}.linear.weight"] = torch.randn(size, size, generator=draw)
            tensors[f"{k}.{layer}.linear.bias"] = torch.randn(size, generator=draw)
        own = torch.randn(config.vocab_size, config.hidden_size, generator=draw)
        tensors[f"{k}.{config.num_layers}.weight"] = shared if config.tied else own
    return tensors


def write(directory: Path, config: ExportConfig, tensors=None, choices=TREE, tokenizer=None, card="card") -> Path:
    tensors = heads_of(config) if tensors is None else tensors
    write_export(directory, tensors, config, tokenizer=tokenizer or TokenizerStub(), choices=choices, card=card)
    return directory


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "medusa_lm_head.safetensors")


def holds(directory: Path, config: ExportConfig, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether an export, read back, is these heads bit for bit."""
    found_config, found = read_export(directory)
    same = all(torch.equal(found[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in found)
    return found_config == config and found.keys() == tensors.keys() and same
