"""Another kind of heads is one file: nothing outside of it asks which kind it is."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import pipeline
from pipeline.errors import ConfigError
from pipeline.export.directory import read_heads, write_export
from pipeline.export.layout import ExportLayout, read_layout
from pipeline.heads.kind import TargetWeights
from pipeline.heads.kinds import KINDS
from pipeline.heads.shapes import ExportFormat
from tests.export.exports import TokenizerStub
from tests.flows.tiny import STAGES, latest, run_again
from tests.heads.linear_heads import LinearHeads, LinearShape

SOURCES = Path(pipeline.__file__).parent


@pytest.fixture(autouse=True)
def linear(monkeypatch):
    monkeypatch.setitem(KINDS, "linear", LinearHeads)


def test_another_kind_runs_the_whole_flow_and_changes_no_token(make_config, tmp_path):
    run = run_again(make_config(tmp_path, train__heads="linear"))
    assert all(latest(run, name).done for name in STAGES)
    trained = load_file(latest(run, "train").path / "heads.safetensors")
    assert trained.keys() == {f"heads.{k}.weight" for k in range(3)}
    export = latest(run, "export").path
    assert read_layout(export).shape == LinearShape(hidden_size=64, vocab_size=300, num_heads=3)
    exported = load_file(export / "model.safetensors")
    assert all(torch.equal(exported[name], trained[name]) for name in trained)
    config = json.loads((export / "config.json").read_text())
    assert config["model_type"] == "linear-heads" and "speculators_config" not in config
    card = (export / "README.md").read_text()
    assert "# Linear heads for" in card and "vllm serve" not in card
    native = json.loads((run.path / "report.json").read_text())["check"]["native"]
    assert native["greedy_match"] == {"sequences": 8, "identical": 8, "ties": 0}
    assert native["acceleration_rate"] > 1


def test_unknown_and_unserved_kinds_are_refused_at_once(make_config, tmp_path):
    unserved = {"train__heads": "linear", "check__engines": ["native", "vllm"]}
    for settings in ({"train__heads": "medsua"}, unserved):
        with pytest.raises(ConfigError, match=r"Did you mean medusa|check\.engines") as caught:
            run_again(make_config(tmp_path, **settings))
        assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_another_kind_learns_with_its_backbone_too(make_config, tmp_path):
    """Kind and method do not know each other."""
    settings = {
        "train__heads": "linear",
        "train__method": "medusa-2",
        "train__backbone": {
            "sequence_length": 128,
            "batch_sequences": 8,
            "lora_rank": 4,
            "max_kl": 100,
        },
    }
    run = run_again(make_config(tmp_path, **settings))
    check = json.loads((run.path / "report.json").read_text())["check"]
    assert check["passed"] and check["native"]["greedy_match"]["identical"] == 8
    assert (latest(run, "export").path / "backbone" / "config.json").is_file()


class SharingHeads(LinearHeads):
    """Linear heads of which all but the first are the target's matrices, left out of exports."""

    def named_tensors(self, format: ExportFormat | None = None) -> dict[str, torch.Tensor]:
        tensors = super().named_tensors()
        return {name: tensors[name] for name in (["heads.0.weight"] if format else tensors)}

    def take_from(self, target: TargetWeights) -> None:
        self.lm_head.data[1].copy_(target.lm_head())
        self.lm_head.data[2].copy_(target.embedding())


def test_what_an_export_leaves_out_is_taken_from_its_target(tmp_path, monkeypatch, tiny_target):
    monkeypatch.setitem(KINDS, "linear", SharingHeads)
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    lm_head, embedding = model.lm_head.weight.detach(), model.model.embed_tokens.weight.detach()
    weights = TargetWeights(lambda: lm_head, lambda: embedding)
    heads = SharingHeads.initial(LinearShape(64, 300, 3), weights)
    heads.take_from(weights)
    heads.lm_head.data[0] += 1
    write_export(
        tmp_path / "export",
        heads,
        ExportLayout(str(tiny_target), heads.shape),
        target={},
        tokenizer=TokenizerStub(),
        choices=[(0,)],
        card="",
    )
    assert load_file(tmp_path / "export" / "model.safetensors").keys() == {"heads.0.weight"}
    assert torch.equal(read_heads(tmp_path / "export", model).lm_head, heads.lm_head)


def test_only_a_kind_s_own_file_depends_on_it():
    """But for the configuration, which has a section per kind."""
    names = {"medusa", "recurrent"}
    modules = {f"pipeline.heads.{name}" for name in names}
    fields = {"num_layers", "block_weight", "block_bias", "intermediate_size"}
    for file in SOURCES.rglob("*.py"):
        if file.relative_to(SOURCES).parts[0] in ("heads", "config"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            where = f"{file.relative_to(SOURCES)}:{getattr(node, 'lineno', 0)}"
            match node:
                case ast.ImportFrom(module=module):
                    assert module not in modules, where
                case ast.Attribute(attr=name):
                    assert name not in names | fields, where
                case ast.Constant(value=str(text)):
                    assert text not in names, where


def test_importing_shapes_imports_no_torch():
    code = "import sys, pipeline.heads.shapes; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
