"""Exports to push: heads and a tuned backbone, with a report that allows it."""

from __future__ import annotations

from pipeline.artifacts.json_form import from_json
from pipeline.config.load import validate
from pipeline.export.card import Published
from pipeline.export.hub import backbone_upload, heads_upload, send_all
from pipeline.report.report import Report
from pipeline.storage.fingerprint import FileFacts
from tests.export.exports import TokenizerStub, config_of, write

MATCH = {"sequences": 4, "identical": 4, "ties": 0, "tokens": 2048}
PASSED = {
    "num_heads": 1,
    "check": {
        "passed": True,
        "failures": [],
        "native": {"acceleration_rate": 2.0, "greedy_match": MATCH},
        "vllm": {"acceleration_rate": 1.5, "greedy_match": MATCH},
    },
}
EXPORTED = {
    "README.md",
    "config.json",
    "medusa_choices.json",
    "medusa_lm_head.safetensors",
    "tokenizer.json",
}
BACKBONE = {
    "config.json": "{}",
    "backbone.json": "{}",
    "model-00001-of-00002.safetensors": "first",
    "model-00002-of-00002.safetensors": "second",
}


def run_config(target="owner/target", source=None, **sections):
    """The configuration of a run."""
    sections = {"train": {"heads": "medusa"}, **sections}
    sections["target"] = {"model": target, **sections.get("target", {})}
    sources = [source or {"hub": "owner/seeds"}]
    return validate({"run": {"name": "pushed"}, "seeds": {"sources": sources}, **sections}, "test")


def export_to(directory, *further, base_model="owner/target", tokenizer="{}"):
    rest = {"tokenizer": TokenizerStub(tokenizer), "card": "before the check", "further": further}
    layout = config_of(base_model, num_heads=1, lm_head="shared")
    write(directory, layout, choices=[[0]], **rest)
    for bookkeeping in ("stage.json", "DONE.json", "lock", ".hidden"):
        (directory / bookkeeping).write_text(str(directory))
    return directory


def backbone_to(directory):
    directory.mkdir()
    for name, text in BACKBONE.items():
        (directory / name).write_text(text)
    return directory


def published(report=PASSED, config=None, **changes):
    report = from_json(Report, report)
    return Published(report, config or run_config(), **{"repo_id": "me/pushed", **changes})


def heads_of_export(export, **changes):
    return heads_upload(export, published(**changes), sums(export))


def backbone_of(directory, **changes):
    usual = {"base_model": "owner/target", "tuned": True, "heads_repo_id": "me/heads"}
    return backbone_upload(directory, published(**{**usual, **changes}), sums(directory))


def send(upload, *, private=False):
    return send_all({"it": upload}, private=private)["it"]


def sums(directory):
    """The facts of every file that a stage's record would name: no bookkeeping, no card."""
    found = {}
    for file in directory.rglob("*"):
        name = file.relative_to(directory).as_posix()
        is_other = name in ("stage.json", "DONE.json", "lock", ".hidden", "README.md")
        if file.is_file() and not is_other:
            found[name] = FileFacts.of(file)
    return found
