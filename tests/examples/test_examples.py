"""Every example runs on the tiny target, and the notebook's cells run in order."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch, capsys):
    """`example(name, *arguments)` runs it and returns what it printed."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_distil(example, config_file):
    words = ("train.num_heads=2", "calibrate.draft_tokens=2")
    said = example("distil", config_file, "--inline", *words)
    assert "acceleration rate" in said and "serve it: vllm serve" in said


@pytest.mark.slow
def test_sweep_recipes_caches_the_states_once(example, config_file, tmp_path):
    settings = config_file.read_text()
    config_file.write_text(settings.replace("draft_tokens: 3", "draft_tokens: auto"))
    said = example("sweep_recipes", config_file, tmp_path / "store")
    assert all(f"\n{name}" in said for name in ("as-it-is", "fewer-heads", "even-weights"))
    made = [path.name.rpartition("-")[0] for path in (tmp_path / "store").iterdir()]
    assert made.count("features") == 1 and made.count("train") == 3


def test_decode(example, finished_run):
    said = example("decode", finished_run.path / "latest" / "export", "why cat runs", "how moon")
    assert "equal to plain decoding: True" in said and "batch of 2" in said


def test_read_cache_needs_none_of_this_project(example, finished_run):
    said = example("read_cache", finished_run.path)
    assert "00000.parquet" in said and ", 64)" in said
    assert "pipeline" not in (EXAMPLES / "read_cache.py").read_text()


def test_score_tree(example, finished_run, tmp_path):
    (tmp_path / "mine.json").write_text("[[0], [0, 0], [1]]")
    said = example("score_tree", finished_run.path, tmp_path / "mine.json")
    assert said.splitlines()[-1].split()[:2] == ["yours", "3"]


def test_the_notebook_s_cells_run_in_order(finished_run, monkeypatch, capsys):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = json.loads((EXAMPLES / "first_look.ipynb").read_text())["cells"]
    names: dict = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
            if "parameters" in cell["metadata"].get("tags", ()):
                names |= {"RUN": finished_run.path, "QUESTION": "why cat runs"}
    assert "tokens per forward" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_listed_and_states_its_command(path):
    text = path.read_text()
    assert f"python examples/{path.name}" in text
    assert f"({path.name})" in (EXAMPLES / "README.md").read_text()
