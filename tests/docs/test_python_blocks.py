"""The Python in README.md and docs/python.md runs as it stands, on the tiny target."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from pipeline import open_run

ROOT = Path(__file__).parents[2]


def python_blocks(page: str) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE
    )


@pytest.fixture
def place(tmp_path, finished_run, make_settings, monkeypatch):
    """A working directory in which the paths that the pages name are those of the tiny run."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(finished_run.path)
    (tmp_path / "configs").mkdir()
    for name in ("demo", "qwen2.5-7b"):
        settings = make_settings(tmp_path / "runs", calibrate__nodes=4)
        (tmp_path / "configs" / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "my_tree.json").write_text(json.dumps([[0], [0, 0]]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_readme_s_python_runs(place, capsys):
    (block,) = python_blocks("README.md")
    exec(compile(block, "README.md", "exec"), {})
    assert re.search(r"\d+ tokens in \d+ steps", capsys.readouterr().out)


@pytest.mark.slow
def test_the_python_of_its_page_runs_from_top_to_bottom(place, finished_run):
    names: dict = {}
    for number, block in enumerate(python_blocks("docs/python.md")):
        exec(compile(block, f"docs/python.md, block {number}", "exec"), names)
        if number == 0:
            assert open_run("runs/trial").tree() == names["run"].tree()
            names["run"] = open_run(finished_run.path)
