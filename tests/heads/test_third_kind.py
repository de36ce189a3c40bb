"""Another kind of heads is one file: nothing outside of it asks which kind it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pipeline
from pipeline.errors import ConfigError
from pipeline.export.layout import read_layout
from pipeline.heads.kinds import KINDS
from tests.flows.tiny import STAGES, latest, report_of, run_again
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
    card = (export / "README.md").read_text()
    assert "# Linear heads for" in card and "vllm serve" not in card
    native = report_of(run)["check"]["native"]
    assert native["greedy_match"]["identical"] == 8
    assert native["acceleration_rate"] > 1


def test_unknown_and_unserved_kinds_are_refused_at_once(make_config, tmp_path):
    unserved = {"train__heads": "linear", "check__engines": ["native", "vllm"]}
    for settings in ({"train__heads": "medsua"}, unserved):
        with pytest.raises(ConfigError, match=r"Use one of medusa|check\.engines"):
            run_again(make_config(tmp_path, **settings))
    assert not (tmp_path / "run").exists()


def test_only_a_kind_s_own_file_depends_on_it():
    """But for the configuration, which has a section per kind."""
    names = {"medusa", "recurrent"}
    modules = {f"pipeline.heads.{name}" for name in names}
    for file in SOURCES.rglob("*.py"):
        if file.relative_to(SOURCES).parts[0] in ("heads", "config"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            where = f"{file.relative_to(SOURCES)}:{getattr(node, 'lineno', 0)}"
            match node:
                case ast.ImportFrom(module=module):
                    assert module not in modules, where
                case ast.Attribute(attr=name):
                    assert name not in names, where
                case ast.Constant(value=str(text)):
                    assert text not in names, where
