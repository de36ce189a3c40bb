"""An export to push, a report that allows it, and the push to the stand-in of the Hub."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from pipeline.export.hub import push_export
from pipeline.export.parcel import Push
from pipeline.heads.medusa import MedusaHeads
from tests.export.exports import TokenizerStub, config_of, write
from tests.export.hub_stand_in import HubStandIn

MATCH = {"sequences": 4, "identical": 4, "ties": 0}
PASSED = {
    "num_heads": 1,
    "check": {
        "passed": True,
        "native": {"acceleration_rate": 2.0, "greedy_match": MATCH},
        "vllm": {"acceleration_rate": 1.5, "greedy_match": MATCH},
    },
}
EXPORTED = {"README.md", "config.json", "medusa_choices.json", "medusa_lm_head.safetensors", "tokenizer.json"}


def export_to(directory: Path, base_model: str = "owner/target", tokenizer: str = "{}") -> Path:
    config = config_of(base_model, num_heads=1)
    heads = MedusaHeads(config.shape)
    for parameter in heads.parameters():
        torch.nn.init.ones_(parameter)
    write(directory, config, heads, choices=[[0]], tokenizer=TokenizerStub(tokenizer), card="before the check")
    for bookkeeping in ("stage.json", "DONE.json", "lock", ".hidden"):
        (directory / bookkeeping).write_text(str(directory))
    return directory


def push(export: Path, hub: HubStandIn, **changes) -> dict:
    usual = {"repo_id": "me/heads", "report": PASSED, "recipe": {}}
    return push_export(export, Push(**usual | changes), sums(export))


def sums(directory: Path) -> dict[str, str]:
    """The sha256 of every file that a stage's record would name: no bookkeeping, no tuned backbone, no card."""
    tuned = (directory / "backbone" / "backbone.json").exists()
    found = {file.relative_to(directory).as_posix(): file for file in directory.rglob("*") if file.is_file()}
    return {
        name: hashlib.sha256(file.read_bytes()).hexdigest()
        for name, file in found.items()
        if name not in ("stage.json", "DONE.json", "lock", ".hidden", "README.md")
        and not (tuned and name.startswith("backbone/"))
    }
